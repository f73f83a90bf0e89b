"""Reads of trunks and the rest of a layout together are what the layout reads, each key once."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from tests.layout.tries import Batch, batch_of, batches, segment_paths
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.layout.trunk_reads import TrunkReads, read_trunks


def reads_of(reads: TrunkReads) -> Iterator[tuple[int, int]]:
    """(row, key) of every read of a trunk."""
    bounds = zip(pairwise(reads.cu_seqlens_q.tolist()), pairwise(reads.cu_seqlens_k.tolist()), strict=True)
    for (q_start, q_stop), (k_start, k_stop) in bounds:
        for row in range(q_start, q_stop):
            yield from ((reads.rows.start + row, reads.keys.start + key) for key in range(k_start, k_stop))


def reads_of_segments(layout: PackedLayout) -> Iterator[tuple[int, int]]:
    """(row, key) of each segment, as if its rows read all of its keys."""
    for s, (start, stop) in enumerate(pairwise(layout.cu_seqlens_k.tolist())):
        for row in range(*layout.cu_seqlens_q[s : s + 2].tolist()):
            yield from ((row, key) for key in layout.kv_index[start:stop].tolist())


@given(batches(with_classes=True))
def test_every_key_is_read_once_through_a_root_or_in_the_rest(batch: Batch) -> None:
    layout = batch.layout()
    reads = read_trunks(layout, copies_per_row=0.0)
    if reads is None:
        assert not (layout.segment_parent >= 0).any()
        return
    apart = Counter([*reads_of(reads), *reads_of_segments(reads.rest)])
    assert apart == Counter(reads_of_segments(layout))
    assert reads.cu_seqlens_q[-1] == reads.rows.stop - reads.rows.start
    assert reads.cu_seqlens_k[-1] == reads.keys.stop - reads.keys.start
    assert reads.max_seqlen_q == np.diff(reads.cu_seqlens_q).max()
    assert reads.max_seqlen_k == np.diff(reads.cu_seqlens_k).max()


@given(batches(with_classes=True))
def test_the_rest_is_a_layout_of_the_same_rows_whose_trees_have_lost_their_roots(batch: Batch) -> None:
    layout = batch.layout()
    reads = read_trunks(layout, copies_per_row=0.0)
    if reads is None:
        return
    rest, bounds = reads.rest, pairwise(reads.rest.cu_seqlens_k.tolist())
    assert [rest.kv_index[start:stop].tolist() for start, stop in bounds] == segment_paths(rest)
    assert rest.segment_start.tolist() == [
        len(path) - own for path, own in zip(segment_paths(rest), np.diff(rest.cu_seqlens_q).tolist(), strict=True)
    ]
    for s, path in enumerate(segment_paths(rest)):
        own = path[rest.segment_start[s] :]
        assert rest.key_place[own].tolist() == list(range(rest.segment_start[s], len(path)))


PROMPT = tuple(range(100, 132))


def group(num_responses: int, length: int) -> Batch:
    return batch_of(*[(PROMPT, range(1000 * i, 1000 * i + length)) for i in range(num_responses)])


@pytest.mark.parametrize(
    ("batch", "told_apart"),
    [
        pytest.param(group(16, 2), True, id="many short responses"),
        pytest.param(group(2, 30), False, id="few long ones"),
        pytest.param(batch_of((PROMPT, (1, 2))), False, id="one response"),
    ],
)
def test_roots_are_told_apart_where_many_copies_are_avoided(batch: Batch, told_apart: bool) -> None:
    assert (read_trunks(batch.layout()) is not None) == told_apart


def test_of_one_group_no_row_is_left_over() -> None:
    """Rows without a key, and keys of nobody, would be filled with zeros and added up."""
    reads = read_trunks(group(16, 2).layout())
    assert reads is not None
    assert (reads.rows, reads.keys) == (slice(31, 63), slice(0, 31))
    assert (reads.cu_seqlens_q.tolist(), reads.cu_seqlens_k.tolist()) == ([0, 32], [0, 31])
