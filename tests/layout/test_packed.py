"""Packed layouts over random trees: nothing is lost, nothing is computed twice, nothing leaks; a few written out."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.tries import Batch, batch_of, batches, row_keys, row_paths, segment_paths, segment_tokens
from verl_pg_plugin.layout import build_packed_layout

PROMPT = (10, 11, 12, 13)


@given(batches(with_classes=True))
def test_every_distinct_token_is_computed_exactly_once(batch: Batch) -> None:
    layout, keys = batch.layout(), batch.rows()
    assert Counter(row_keys(layout)) == Counter(key for _, key in keys)
    assert layout.num_tokens == len(keys)
    assert layout.num_logical_tokens == sum(map(len, batch.sequences))
    assert layout.num_groups == len({(c, key) for c, key in keys if len(key) == 2})
    assert layout.shares_tokens == (len(keys) < sum(len(sequence) - 1 for sequence in batch.sequences))
    assert not layout.is_chunk


@given(batches())
def test_every_sequence_is_reconstructed_from_its_tokens(batch: Batch) -> None:
    layout = batch.layout()
    paths = dict(zip(row_keys(layout), row_paths(layout), strict=True))
    for sequence in batch.sequences:
        path = paths[sequence]  # key of its last token: all before, then its label
        assert layout.input_ids[path].tolist() == list(sequence[:-1])
        assert layout.labels[path].tolist() == list(sequence[1:])
        assert layout.position_ids[path].tolist() == list(range(len(sequence) - 1))


@given(batches(with_classes=True))
def test_a_segment_attends_to_its_own_path_and_never_to_a_sibling(batch: Batch) -> None:
    layout = batch.layout()
    num_own, paths = np.diff(layout.cu_seqlens_q), segment_paths(layout)
    assert [layout.kv_index[a:b].tolist() for a, b in pairwise(layout.cu_seqlens_k.tolist())] == paths
    assert (layout.cu_seqlens_q[0], layout.cu_seqlens_q[-1]) == (0, layout.num_tokens)
    assert (num_own > 0).all()
    assert (layout.segment_parent < np.arange(len(num_own))).all()
    assert layout.segment_start.tolist() == [len(path) - own for path, own in zip(paths, num_own.tolist(), strict=True)]


@given(batches(with_classes=True))
def test_segments_end_only_where_sequences_part_and_keys_are_gathered_only_where_two_read_them(batch: Batch) -> None:
    layout = batch.layout()
    children = Counter(layout.segment_parent.tolist())
    assert layout.num_groups == children.pop(-1)
    assert all(count > 1 for count in children.values())
    read_twice = max(Counter(layout.kv_index.tolist()).values()) > 1
    assert layout.num_gathered_kv == (len(layout.kv_index) if read_twice else 0)
    assert read_twice or layout.kv_index.tolist() == list(range(layout.num_tokens))


@given(batches(with_classes=True))
def test_the_lm_head_runs_where_a_response_token_is_predicted_and_each_is_read_from_there(batch: Batch) -> None:
    layout = batch.layout()
    keys, heads = row_keys(layout), layout.head_index[layout.response_head].tolist()
    assert Counter(keys[token] for token in layout.head_index) == Counter(key for _, key in batch.response_rows())
    assert (np.diff(layout.head_index) > 0).all()
    expected = {
        int(batch.offsets[s]) + t: tokens[: t + 2]
        for s, tokens in enumerate(batch.sequences)
        for t in range(batch.prompt_lengths[s] - 1, len(tokens) - 1)
    }
    assert len(layout.response_index) == len(expected)
    assert {i: keys[token] for i, token in zip(layout.response_index.tolist(), heads, strict=True)} == expected


@given(batches(with_classes=True))
def test_sequences_of_different_temperature_never_share_a_token(batch: Batch) -> None:
    layout = batch.layout()
    keys, paths = row_keys(layout), row_paths(layout)
    for token, sequence in zip(layout.head_index.tolist(), layout.head_sequence.tolist(), strict=True):
        assert batch.sequences[sequence][: len(keys[token])] == keys[token]
    sequence_of = np.searchsorted(batch.offsets, layout.response_index, side="right") - 1
    class_of: dict[int, int] = {}
    for sequence, head in zip(sequence_of.tolist(), layout.response_head.tolist(), strict=True):
        assert batch.class_of(sequence) == batch.class_of(int(layout.head_sequence[head]))
        for visible in paths[int(layout.head_index[head])]:
            assert class_of.setdefault(visible, batch.class_of(sequence)) == batch.class_of(sequence)


@given(batches(), st.data())
def test_the_order_of_the_batch_changes_nothing_but_where_results_go(batch: Batch, data: st.DataObject) -> None:
    one, other = batch.layout(), batch.take(data.draw(st.permutations(range(len(batch.sequences))))).layout()
    assert Counter(row_keys(one)) == Counter(row_keys(other))
    assert segment_tokens(one) == segment_tokens(other)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_token_ids_of_every_width_give_the_same_layout(dtype: type) -> None:
    tokens, offsets = np.array([7, 255, 256, 1, 7, 255, 65536, 2]), np.array([0, 4, 8])
    layout = build_packed_layout(tokens.astype(dtype), offsets, np.array([2, 2]))
    assert Counter(row_keys(layout)) == Counter(
        [(7, 255), (7, 255, 256), (7, 255, 256, 1), (7, 255, 65536), (7, 255, 65536, 2)]
    )


def test_a_grpo_group_is_its_prompt_once_and_one_segment_per_response_that_repeats_the_last_prompt_token() -> None:
    layout = batch_of((PROMPT, (1, 2, 3)), (PROMPT, (4,)), (PROMPT, (5, 6))).layout()
    assert layout.input_ids.tolist() == [10, 11, 12, 13, 1, 2, 13, 13, 5]
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 3, 3, 4]
    assert layout.labels.tolist() == [11, 12, 13, 1, 2, 3, 4, 5, 6]
    assert layout.segment_parent.tolist() == [-1, 0, 0, 0]
    assert layout.segment_start.tolist() == [0, 3, 3, 3]
    assert layout.cu_seqlens_q.tolist() == [0, 3, 6, 7, 9]
    assert layout.cu_seqlens_k.tolist() == [0, 3, 9, 13, 18]
    assert layout.kv_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 0, 1, 2, 7, 8]
    assert layout.head_index.tolist() == [3, 4, 5, 6, 7, 8]
    assert layout.response_index.tolist() == [3, 4, 5, 10, 15, 16]
    assert layout.response_head.tolist() == [0, 1, 2, 3, 4, 5]
    assert (layout.num_tokens, layout.num_logical_tokens, layout.num_groups) == (9, 18, 1)


def turns(count: int, length: int = 3) -> list[tuple[range, range]]:
    """Prompts of ever more turns, and the response to each."""
    return [
        (range(2 * length * k + length), range(2 * length * k + length, 2 * length * (k + 1))) for k in range(count)
    ]


def test_turns_that_only_continue_one_another_are_one_segment_and_gather_no_key() -> None:
    """Each turn a sequence of its own, as agent loops hand them in: 200 turns would gather 101 keys per token."""
    layout = batch_of(*turns(200)).layout()
    assert layout.segment_parent.tolist() == [-1]
    assert layout.kv_index.tolist() == list(range(layout.num_tokens)) == layout.position_ids.tolist()
    assert (layout.num_tokens, layout.num_gathered_kv) == (200 * 6 - 1, 0)
    # two turns and the third prompt less its last token | the rest | the other response
    branched = batch_of(*turns(4), (range(9), (99, 98))).layout()
    assert branched.segment_parent.tolist() == [-1, 0, 0]
    assert branched.segment_start.tolist() == [0, 8, 8]


@pytest.mark.parametrize(
    ("prompt_lengths", "message"),
    [([2, 0], "sequence 1 has an empty prompt"), ([2, 3], "sequence 1 has an empty response")],
)
def test_empty_prompts_and_responses_are_refused_by_name(prompt_lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_packed_layout(np.arange(6), np.array([0, 3, 6]), np.array(prompt_lengths))


@pytest.mark.parametrize("token", [-100, -1, 2**32])
def test_ids_that_are_no_tokens_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=r"token ids must lie in \[0, 2\*\*32\), got"):
        build_packed_layout(np.array([1, 2, token]), np.array([0, 3]), np.array([1]))
