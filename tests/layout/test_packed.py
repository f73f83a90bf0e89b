"""Packed layouts over random trees: nothing is lost, nothing is computed twice, nothing leaks; a few written out."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.tries import Batch, batch_of, batches, response_places, row_keys, row_paths, segment_paths
from verl_pg_plugin.layout import build_packed_layout

PROMPT = (10, 11, 12, 13)


@given(batches(with_classes=True))
def test_every_distinct_token_is_computed_exactly_once(batch: Batch) -> None:
    layout, keys = batch.layout(), batch.rows()
    assert Counter(row_keys(layout)) == Counter(key for _, key in keys)
    assert layout.position_ids.tolist() == [len(key) - 2 for key in row_keys(layout)]
    assert layout.num_tokens == len(keys)
    assert layout.num_logical_tokens == sum(map(len, batch.sequences))
    assert (layout.segment_start == 0).sum() == len({(c, key) for c, key in keys if len(key) == 2})
    assert layout.shares_tokens == (len(keys) < sum(len(sequence) - 1 for sequence in batch.sequences))
    assert not layout.is_chunk


@given(batches(with_classes=True))
def test_a_segment_attends_to_its_own_path_and_ends_only_where_sequences_part(batch: Batch) -> None:
    layout = batch.layout()
    num_own, paths = np.diff(layout.cu_seqlens_q), segment_paths(layout)
    assert [layout.kv_index[a:b].tolist() for a, b in pairwise(layout.cu_seqlens_k.tolist())] == paths
    assert (layout.cu_seqlens_q[0], layout.cu_seqlens_q[-1]) == (0, layout.num_tokens)
    assert (num_own > 0).all()
    assert (layout.segment_parent < np.arange(len(num_own))).all()
    assert layout.segment_start.tolist() == [len(path) - own for path, own in zip(paths, num_own.tolist(), strict=True)]
    children = Counter(layout.segment_parent.tolist())
    assert (layout.segment_start == 0).sum() == children.pop(-1)
    assert all(count > 1 for count in children.values())
    read_twice = max(Counter(layout.kv_index.tolist()).values()) > 1
    assert layout.num_gathered_kv == (len(layout.kv_index) if read_twice else 0)


@given(batches(with_classes=True))
def test_each_response_token_is_read_where_its_own_sequence_predicts_it(batch: Batch) -> None:
    """Sequences of different temperature never share a token."""
    layout = batch.layout()
    keys, paths, heads = row_keys(layout), row_paths(layout), layout.head_index.tolist()
    assert (np.diff(layout.head_index) > 0).all()
    assert set(layout.response_head.tolist()) == set(range(len(heads))), "the head runs nowhere else"
    expected = response_places(batch)
    assert len(layout.response_index) == len(expected)
    class_of: dict[int, int] = {}
    for place, head in zip(layout.response_index.tolist(), layout.response_head.tolist(), strict=True):
        sequence, key = expected.pop(place)
        assert keys[heads[head]] == key
        by = int(layout.head_sequence[head])
        assert (batch.class_of(by), batch.sequences[by][: len(key)]) == (batch.class_of(sequence), key)
        for visible in paths[heads[head]]:
            assert class_of.setdefault(visible, batch.class_of(sequence)) == batch.class_of(sequence)
    assert not expected


@given(batches(), st.data())
def test_the_order_of_the_batch_changes_nothing_but_where_results_go(batch: Batch, data: st.DataObject) -> None:
    one, other = batch.layout(), batch.take(data.draw(st.permutations(range(len(batch.sequences))))).layout()
    for name in ("input_ids", "labels", "cu_seqlens_q", "cu_seqlens_k", "kv_index", "segment_parent"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


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
    assert (layout.num_tokens, layout.num_logical_tokens, (layout.segment_start == 0).sum()) == (9, 18, 1)


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
    ("tokens", "prompt_lengths", "message"),
    [
        (range(6), [2, 0], "sequence 1 has an empty prompt"),
        (range(6), [2, 3], "sequence 1 has an empty response"),
        *[
            ([1, 2, 3, 4, 5, token], [1, 1], r"token ids must lie in \[0, 2\*\*32\), got")
            for token in (-100, -1, 2**32)
        ],
    ],
)
def test_sequences_that_are_none_are_refused(tokens: list[int], prompt_lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_packed_layout(np.array(tokens), np.array([0, 3, 6]), np.array(prompt_lengths))
