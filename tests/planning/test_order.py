"""Ranks that wait for each other at every micro-batch run dear ones together, and keep chains whole."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_pg_plugin.planning.order import align


def chain(*costs: float) -> np.ndarray:
    return np.array([[cost, 0.0] for cost in costs])


def time_of(ranks: list, orders: list) -> float:
    lines = [np.concatenate([chains[i] for i in order]) for chains, order in zip(ranks, orders, strict=True)]
    return float(np.stack(lines).max(axis=0).sum())


def by_mean(ranks: list) -> list:
    return [sorted(range(len(chains)), key=lambda i, chains=chains: -chains[i].sum(1).mean()) for chains in ranks]


def test_chains_of_unequal_parts_meet_where_they_are_dear() -> None:
    """By their means alone, the dear part of one chain meets the cheap part of the other."""
    ranks = [[chain(10, 2), chain(5)], [chain(8), chain(9, 1)]]
    assert time_of(ranks, by_mean(ranks)) == 10 + 9 + 5
    assert time_of(ranks, align(ranks)) == 10 + 2 + 8


def test_a_phase_ends_before_the_next_begins() -> None:
    """Exports are waited for as well: two at once take no longer than one."""
    exporting, plain = np.array([[5.0, 0.0], [5.0, 4.0]]), chain(5)
    ranks = [[exporting, plain, plain], [plain, exporting, plain]]
    assert time_of(ranks, [[0, 1, 2], [0, 1, 2]]) == 20 + 8
    assert time_of(ranks, align(ranks)) == 20 + 4


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 20), min_size=2, max_size=2), min_size=6, max_size=6), min_size=1, max_size=4
    ),
    st.lists(st.sets(st.integers(1, 5)), min_size=4, max_size=4),
)
def test_chains_stay_whole_and_nobody_waits_longer_than_by_cost_alone(parts: list, cuts: list) -> None:
    ranks = [np.split(np.array(rank, dtype=float), sorted(cut)) for rank, cut in zip(parts, cuts, strict=False)]
    orders = align(ranks)
    assert [sorted(order) for order in orders] == [list(range(len(chains))) for chains in ranks]
    assert time_of(ranks, orders) <= time_of(ranks, by_mean(ranks)) * (1 + 1e-9)


@pytest.mark.parametrize(("num_ranks", "num_chains"), [(1024, 10), (8, 200)])
def test_the_time_does_not_grow_with_ranks_and_chains(num_ranks: int, num_chains: int) -> None:
    rng = np.random.default_rng(0)
    ranks = [[chain(*rng.random(3)) for _ in range(num_chains)] for _ in range(num_ranks)]
    start = time.process_time()
    align(ranks)
    assert time.process_time() - start < 2
