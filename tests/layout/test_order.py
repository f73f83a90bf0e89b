"""The sorted order that layouts and micro-batches are both cut from, and images in it, which are computed whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.tries import Batch, batches
from verl_pg_plugin.layout import IntArray, Sequences, build_packed_layout, build_prefix_order


@given(batches(with_classes=True))
def test_neighbours_share_what_the_whole_tree_shares(batch: Batch) -> None:
    """If a sequence shared more with one further up, tokens would be computed twice."""
    order = batch.order()
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for sequence, num_tokens, num_shared in zip(order.sequences, order.num_tokens, order.num_shared, strict=True):
        rows = batch.take([int(sequence)]).rows()
        assert (num_tokens, num_shared) == (len(rows), len(rows & seen))
        seen |= rows
    assert int(order.num_new.sum()) == len(seen)
    assert sorted(order.sequences.tolist()) == list(range(len(batch.sequences)))
    keys = [(batch.class_of(s), batch.sequences[s]) for s in order.sequences.tolist()]
    assert keys == sorted(keys)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_tokens_of_several_bytes_are_sorted_as_numbers(dtype: type) -> None:
    """Ranks of another byte order would cut the same batch otherwise."""
    tokens = np.array([256, 1, 0, 1, 1, 0, 65536, 1, 0, 255, 1, 0], dtype=dtype)
    assert build_prefix_order(tokens, np.arange(0, 13, 3)).sequences.tolist() == [1, 3, 0, 2]


def test_a_sequence_of_one_token_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sequence 1 has fewer than two tokens"):
        build_prefix_order(np.array([1, 2, 3]), np.array([0, 2, 3]))


PART = st.one_of(st.integers(0, 2), st.integers(10, 11))
"""A token of text, or an image of three tokens."""
SEQUENCES = st.lists(
    st.tuples(st.lists(PART, min_size=1, max_size=6), st.integers(0, 2)).map(lambda parts: [*parts[0], parts[1]]),
    min_size=1,
    max_size=8,
)


def laid_out(sequences: list[list[int]]) -> tuple[IntArray, IntArray, IntArray]:
    """Keys, offsets and how far inside an image each stands."""
    keys = [[key for part in parts for key in [part] * (3 if part >= 10 else 1)] for parts in sequences]
    inside = [[k for part in parts for k in range(3 if part >= 10 else 1)] for parts in sequences]
    return np.concatenate(keys), np.cumsum([0, *map(len, keys)]), np.concatenate(inside)


@given(SEQUENCES)
def test_no_fork_lies_inside_an_image_and_nothing_else_is_shared_less(sequences: list[list[int]]) -> None:
    keys, offsets, inside = laid_out(sequences)
    broken, whole = build_prefix_order(keys, offsets), build_prefix_order(keys, offsets, None, inside)
    assert (inside[offsets[whole.sequences] + whole.num_shared] == 0).all()
    lost = broken.num_shared - whole.num_shared
    assert (lost == inside[offsets[broken.sequences] + broken.num_shared]).all()


@given(SEQUENCES.filter(lambda sequences: all(len(parts) > 2 for parts in sequences)))
def test_images_of_a_layout_are_whole_and_tokens_know_where_they_come_from(sequences: list[list[int]]) -> None:
    keys, offsets, inside = laid_out(sequences)
    layout = build_packed_layout(keys, offsets, np.ones(len(sequences), dtype=np.int64), None, inside)
    assert (keys[layout.token_index] == layout.input_ids).all()
    assert (keys[layout.token_index + 1] == layout.labels).all()
    steps = inside[layout.token_index]
    starts = np.flatnonzero((steps == 0) & (layout.input_ids >= 10))
    assert len(starts) * 3 == (layout.input_ids >= 10).sum()
    for start in starts.tolist():
        assert steps[start : start + 3].tolist() == [0, 1, 2]
        assert (np.diff(layout.token_index[start : start + 3]) == 1).all()


def test_an_idle_prefill_computes_all_of_an_image_that_comes_first() -> None:
    for parts, expected in (([10, 1, 2], [10, 10, 10]), ([1, 10, 2], [1])):
        keys, offsets, inside = laid_out([parts])
        sequences = Sequences(keys, offsets, prompt_lengths=np.ones(1, dtype=np.int64), inside=inside)
        assert sequences.lay_out_idle_prefill().input_ids.tolist() == expected
