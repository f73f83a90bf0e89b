"""Packed layouts over random trees: nothing is lost, nothing is computed twice, nothing leaks; a few written out."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.chains import LaidOut, part_keys
from tests.layout.test_chunks import check_attends, check_reads, check_tokens
from tests.layout.tries import Batch, batch_of, batches
from verl_pg_plugin.layout import build_packed_layout

PROMPT = (10, 11, 12, 13)


@given(batches(with_classes=True))
def test_every_token_is_computed_once_and_segments_end_only_where_sequences_part(batch: Batch) -> None:
    """Sequences of different temperature never share a token."""
    layout, whole = batch.layout(), LaidOut(None, batch, batch.layout(), part_keys(batch, 0))
    keys = batch.rows()
    assert len(whole.keys) == len(keys)
    assert set(whole.keys) == keys
    check_tokens(layout, whole.keys)
    check_attends(whole)
    check_reads(whole, [])
    assert layout.num_logical_tokens == sum(map(len, batch.sequences))
    assert layout.shares_tokens == (len(keys) < sum(len(sequence) - 1 for sequence in batch.sequences))
    assert not layout.is_chunk
    children = Counter(layout.segment_parent.tolist())
    roots = len({(c, key) for c, key in keys if len(key) == 2})
    assert (layout.segment_start == 0).sum() == children.pop(-1) == roots
    assert all(count > 1 for count in children.values())
    assert (np.diff(layout.head_index) > 0).all()
    assert set(layout.response_head.tolist()) == set(range(len(layout.head_index))), "the head runs nowhere else"


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
