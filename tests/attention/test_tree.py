"""Reads of prefixes in place and what is left are together what a layout reads, each key once."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from tests.layout.tries import Batch, batch_of, batches
from verl_pg_plugin.attention import tree
from verl_pg_plugin.attention.tree import Piece, read_in_place
from verl_pg_plugin.layout import PackedLayout


def reads_of(reads: Piece) -> Iterator[tuple[int, int]]:
    """(token, key) of every read of a prefix."""
    bounds = zip(
        pairwise(reads.problem.cu_seqlens_q.tolist()), pairwise(reads.problem.cu_seqlens_k.tolist()), strict=True
    )
    for (q_start, q_stop), (k_start, k_stop) in bounds:
        for row in range(q_start, q_stop):
            yield from ((reads.rows.start + row, reads.keys.start + key) for key in range(k_start, k_stop))


def reads_of_segments(layout: PackedLayout, kept: np.ndarray) -> Iterator[tuple[int, int]]:
    """(token, key) of each segment, as if its tokens read all of its keys."""
    for s, (start, stop) in enumerate(pairwise(layout.cu_seqlens_k.tolist())):
        for row in range(*layout.cu_seqlens_q[s : s + 2].tolist()):
            yield from ((row, key) for key in layout.kv_index[start:stop][kept[start:stop]].tolist())


@given(batches(with_classes=True))
def test_every_key_is_read_once_in_place_or_in_the_rest(batch: Batch) -> None:
    layout, everything = batch.layout(), np.ones(len(batch.layout().kv_index), dtype=bool)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tree, "SAVED_PER_TOKEN", 0)
        monkeypatch.setattr(tree, "SHORTEST_IN_PLACE", 1)
        reads, rest = read_in_place(layout)
    assert bool(reads) == (layout.segment_parent >= 0).any()
    found = Counter(pair for read in reads for pair in reads_of(read)) + Counter(reads_of_segments(layout, rest))
    assert found == Counter(reads_of_segments(layout, everything))
    assert rest.sum() == layout.num_tokens, "with every shared prefix in place each key is left to its own segment"
    for read in reads:
        assert read.problem.cu_seqlens_q[-1] == read.rows.stop - read.rows.start
        assert read.problem.cu_seqlens_k[-1] == read.keys.stop - read.keys.start


PROMPT = tuple(range(100, 200))


def group(num_responses: int, length: int, prompt: tuple[int, ...] = PROMPT) -> Batch:
    return batch_of(*[(prompt, range(1000 * i, 1000 * i + length)) for i in range(num_responses)])


@pytest.mark.parametrize(
    ("batch", "in_place"),
    [
        pytest.param(group(16, 2), 1, id="many short responses"),
        pytest.param(group(2, 30), 0, id="few long ones"),
        pytest.param(batch_of((PROMPT, (1, 2))), 0, id="one response"),
        pytest.param(group(16, 2, prompt=PROMPT[:64]), 0, id="below less than a block of keys"),
    ],
)
def test_prefixes_are_read_in_place_where_that_saves_many_gathered_keys(batch: Batch, in_place: int) -> None:
    assert len(read_in_place(batch.layout())[0]) == in_place


def test_of_one_group_no_token_is_left_over() -> None:
    """Queries without keys, and keys of nobody, would be filled with zeros and added up."""
    (reads,), _ = read_in_place(group(16, 2).layout())
    assert (reads.rows, reads.keys) == (slice(99, 131), slice(0, 99))
    assert (reads.problem.cu_seqlens_q.tolist(), reads.problem.cu_seqlens_k.tolist()) == ([0, 32], [0, 99])
