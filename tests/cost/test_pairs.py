"""Pairs in closed form are the pairs that a causal mask with a window lets through."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.tries import Batch, batches
from verl_pg_plugin.cost.pairs import num_pairs, visible_pairs
from verl_pg_plugin.layout import build_packed_layout
from verl_pg_plugin.layout.padded import build_padded_layout

windows = st.none() | st.integers(1, 12)


def keys_seen(position: int, window: int | None) -> int:
    return min(position + 1, window or position + 1)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1), windows)
def test_a_segment_pays_for_the_keys_in_the_window_of_each_query(
    segments: list[tuple[int, int]], window: int | None
) -> None:
    start, rows = np.array(segments).T
    counted = [sum(keys_seen(p, window) for p in range(a, a + n)) for a, n in segments]
    assert visible_pairs(start, rows, window).tolist() == counted


@given(batches(), windows)
def test_packed_rows_pay_once_each_for_what_they_see(batch: Batch, window: int | None) -> None:
    layout = batch.layout()
    assert num_pairs(layout, window) == sum(keys_seen(p, window) for p in layout.position_ids.tolist())


@pytest.mark.parametrize("window", [None, 1, 2, 3, 50])
def test_padded_groups_pay_for_their_rows_and_not_for_padding(window: int | None) -> None:
    tokens = np.array([1, 2, 3, 4, 1, 2, 3, 5, 6, 7, 8])
    arguments = tokens, np.array([0, 4, 9, 11]), np.array([3, 3, 1])
    padded, packed = build_padded_layout(*arguments), build_packed_layout(*arguments)
    assert num_pairs(padded, window) == num_pairs(packed, window)
