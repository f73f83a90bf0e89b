"""Runs of a prefix order cost what their sequences would cost if they were laid out together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.layout.tries  # noqa: F401  (loads the hypothesis profile without a deadline)
from verl_pg_plugin.batching.runs import RunPrices
from verl_pg_plugin.layout.order import IntArray, PrefixOrder, build_prefix_order


def price(start: IntArray, rows: IntArray, head_index: IntArray) -> np.ndarray:
    return 3.0 * rows + 0.01 * ((start + rows) ** 2 - start**2)


def order_of(sequences: list[list[int]]) -> PrefixOrder:
    return build_prefix_order(np.concatenate(sequences), np.append(0, np.cumsum([len(s) for s in sequences])))


def cost_of(sequences: list[list[int]]) -> float:
    order = order_of(sequences)
    return RunPrices(order, np.zeros(len(sequences), dtype=np.int64), price).run(0, len(sequences)).cost


SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=8), min_size=2, max_size=8)


@given(SEQUENCES, st.data())
def test_any_runs_in_one_place_cost_what_a_layout_of_their_sequences_costs(
    sequences: list[list[int]], data: st.DataObject
) -> None:
    order = order_of(sequences)
    prices = RunPrices(order, np.zeros(len(sequences), dtype=np.int64), price)
    chosen = data.draw(st.lists(st.booleans(), min_size=len(sequences), max_size=len(sequences)))
    places = [place for place, wanted in enumerate(chosen) if wanted]
    expected = cost_of([sequences[order.sequences[place]] for place in places]) if places else 0.0
    assert prices.together([prices.run(place, place + 1) for place in places]) == pytest.approx(expected)


def test_a_session_is_cut_off_where_least_is_computed_again() -> None:
    """Two sessions of three rows that continue each other: the fork between them is the prompt's end."""
    prompt, one, two = [9] * 10, [1] * 20, [2] * 20
    sequences = [prompt + one[:k] for k in (5, 12, 20)] + [prompt + two[:k] for k in (5, 12, 20)]
    prices = RunPrices(order_of(sequences), np.zeros(6, dtype=np.int64), price)
    assert [prices.cheapest_cut(prices.run(0, 6), at_most) for at_most in (5, 4, 3)] == [3, 3, 3]
    assert [run.size for run in prices.branches(prices.run(0, 6))] == [3, 3]
    assert prices.cheapest_cut(prices.run(0, 6), 2) == 1, "within a session the earliest fork costs least"


def test_no_head_runs_for_rows_that_an_equal_sequence_has_computed() -> None:
    order = order_of([[1, 2, 3, 4]] * 3)
    prices = RunPrices(order, np.full(3, 2), lambda start, rows, heads: rows + 100.0 * heads)
    assert prices.new.tolist() == [203.0, 0.0, 0.0]


def test_of_cuts_that_cost_the_same_the_one_that_fills_the_room_is_taken() -> None:
    prices = RunPrices(order_of([[9] * 5 + [k, k] for k in range(8)]), np.ones(8, dtype=np.int64), price)
    assert [prices.cheapest_cut(prices.run(0, 8), room) for room in (5, 3, 1)] == [5, 3, 1]
