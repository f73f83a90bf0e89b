"""Ranks and mini-batches: equal in number, nearly equal in cost, and no group torn apart that fits."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.layout.tries  # noqa: F401  (loads the hypothesis profile without a deadline)
from verl_pg_plugin.batching.balance import TOKENS_PER_SQUARED_LENGTH, Balance, balance_groups


@dataclass(frozen=True)
class Problem:
    """B sequences in groups, and the cells (rank x mini-batch) they are dealt to."""

    group: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    num_ranks: int
    num_mini_batches: int

    def solve(self) -> Balance:
        return balance_groups(
            self.group, self.prompt_lengths, self.response_lengths, self.num_ranks, self.num_mini_batches
        )

    def cells(self, order: np.ndarray) -> list[np.ndarray]:
        return np.split(order, self.num_ranks * self.num_mini_batches)

    def cost(self, cell: np.ndarray) -> int:
        """Physical tokens, and the square of every length with the prompt's counted once."""
        prompts = {int(self.group[s]): int(self.prompt_lengths[s]) for s in cell}
        total = sum(TOKENS_PER_SQUARED_LENGTH * p + p**2 for p in prompts.values())
        for s in cell:
            p, r = int(self.prompt_lengths[s]), int(self.response_lengths[s])
            total += TOKENS_PER_SQUARED_LENGTH * r + (p + r) ** 2 - p**2
        return total

    def rank_costs(self, order: np.ndarray) -> list[int]:
        return [sum(map(self.cost, np.split(rank, self.num_mini_batches))) for rank in np.split(order, self.num_ranks)]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Uneven groups, shuffled."""
    num_ranks, num_mini_batches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = num_ranks * num_mini_batches * draw(st.integers(1, 6))
    group = np.array(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    prompt_of = np.array(draw(st.lists(st.integers(1, 9000), min_size=6, max_size=6)))
    responses = np.array(draw(st.lists(st.integers(1, 30000), min_size=size, max_size=size)))
    return Problem(group, prompt_of[group], responses, num_ranks, num_mini_batches)


def grpo(num_groups: int, n: int, num_ranks: int, num_mini_batches: int = 1, seed: int = 0) -> Problem:
    """Groups of n with long-tailed lengths, samples shuffled."""
    generator = np.random.default_rng(seed)
    group = generator.permutation(np.repeat(np.arange(num_groups), n))
    prompts = generator.integers(200, 4000, num_groups)[group]
    responses = np.minimum(generator.lognormal(6.5, 1.0, len(group)).astype(np.int64) + 1, 8192)
    return Problem(group, prompts, responses, num_ranks, num_mini_batches)


@given(problems())
def test_every_sequence_is_dealt_exactly_once(problem: Problem) -> None:
    assert sorted(problem.solve().order.tolist()) == list(range(len(problem.group)))


@given(problems())
def test_the_reported_cost_is_that_of_the_ranks_with_shared_prompts_counted_once(problem: Problem) -> None:
    balance = problem.solve()
    costs = problem.rank_costs(balance.order)
    assert balance.cost.sum(axis=1).tolist() == costs
    waits = balance.cost.max(axis=0).sum() * problem.num_ranks
    assert balance.slowest_over_mean == pytest.approx(waits / sum(costs))


@given(problems())
def test_cut_groups_are_counted_and_all_others_are_whole(problem: Problem) -> None:
    balance = problem.solve()
    places: dict[int, set[int]] = {}
    for i, cell in enumerate(problem.cells(balance.order)):
        for s in cell:
            places.setdefault(int(problem.group[s]), set()).add(i)
    assert sum(len(cells) > 1 for cells in places.values()) == balance.num_cut_groups


@given(problems())
def test_every_rank_computes_the_same_balance_from_the_same_batch(problem: Problem) -> None:
    """And group ids carry no meaning: uids are numbered differently elsewhere."""
    renamed = Problem(
        problem.group * 7 + 3,
        problem.prompt_lengths,
        problem.response_lengths,
        problem.num_ranks,
        problem.num_mini_batches,
    )
    assert np.array_equal(problem.solve().order, renamed.solve().order)


@pytest.mark.parametrize(("num_ranks", "num_mini_batches"), [(1, 1), (8, 1), (8, 4), (4, 8), (64, 1)])
def test_even_groups_that_fit_a_mini_batch_are_never_cut(num_ranks: int, num_mini_batches: int) -> None:
    problem = grpo(64, 8, num_ranks, num_mini_batches)
    assert problem.solve().num_cut_groups == 0


@pytest.mark.parametrize("seed", range(5))
def test_ranks_finish_together(seed: int) -> None:
    problem = grpo(128, 8, num_ranks=8, seed=seed)
    as_drawn = problem.rank_costs(np.argsort(problem.group, kind="stable"))
    balance = problem.solve()
    assert balance.slowest_over_mean < 1.05
    assert balance.cost.sum(axis=1).max() < max(as_drawn)


def test_a_group_larger_than_a_mini_batch_is_cut_into_as_few_parts_as_it_can_be() -> None:
    group = np.array([0] * 6 + [1, 2])
    problem = Problem(group, np.full(8, 10), np.full(8, 10), num_ranks=2, num_mini_batches=1)
    balance = problem.solve()
    assert balance.num_cut_groups == 1
    assert sorted(np.bincount(group[cell], minlength=3).tolist() for cell in problem.cells(balance.order)) in (
        [[2, 1, 1], [4, 0, 0]],
        [[3, 0, 1], [3, 1, 0]],
    )


def test_a_batch_that_does_not_divide_is_refused_with_its_numbers() -> None:
    ones = np.ones(7, dtype=np.int64)
    with pytest.raises(ValueError, match="7 sequences do not divide into 2 ranks x 2 mini-batches"):
        Problem(ones, ones, ones, num_ranks=2, num_mini_batches=2).solve()
