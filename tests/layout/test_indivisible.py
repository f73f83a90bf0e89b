"""A picture is computed whole or not at all: no fork inside it, and everything else is shared as ever."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_pg_plugin.layout import build_packed_layout, build_prefix_order, idle_prefill
from verl_pg_plugin.layout.order import IntArray

PART = st.one_of(st.integers(0, 2), st.integers(10, 11))
"""A token of text, or a picture of three rows."""
SEQUENCES = st.lists(
    st.tuples(st.lists(PART, min_size=1, max_size=6), st.integers(0, 2)).map(lambda parts: [*parts[0], parts[1]]),
    min_size=1,
    max_size=8,
)


def laid_out(sequences: list[list[int]]) -> tuple[IntArray, IntArray, IntArray]:
    """Keys, offsets and how far inside a picture each stands."""
    keys = [[key for part in parts for key in [part] * (3 if part >= 10 else 1)] for parts in sequences]
    inside = [[k for part in parts for k in range(3 if part >= 10 else 1)] for parts in sequences]
    return np.concatenate(keys), np.cumsum([0, *map(len, keys)]), np.concatenate(inside)


@given(SEQUENCES)
def test_no_fork_lies_inside_a_picture_and_no_other_row_is_lost(sequences: list[list[int]]) -> None:
    keys, offsets, inside = laid_out(sequences)
    broken, whole = build_prefix_order(keys, offsets), build_prefix_order(keys, offsets, None, inside)
    fork = offsets[whole.sequences] + whole.num_shared
    assert (inside[fork] == 0).all()
    lost = broken.num_shared - whole.num_shared
    assert ((lost >= 0) & (lost <= 2)).all()
    assert (lost == inside[offsets[broken.sequences] + broken.num_shared]).all()


@given(SEQUENCES.filter(lambda sequences: all(len(parts) > 2 for parts in sequences)))
def test_pictures_of_a_layout_are_whole_and_rows_know_their_token(sequences: list[list[int]]) -> None:
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


def test_an_idle_export_computes_all_of_a_picture_that_comes_first() -> None:
    keys, offsets, inside = laid_out([[10, 1, 2]])
    assert idle_prefill(keys, offsets, inside).input_ids.tolist() == [10, 10, 10]
    keys, offsets, inside = laid_out([[1, 10, 2]])
    assert idle_prefill(keys, offsets, inside).input_ids.tolist() == [1]
