"""Ranks and mini-batches get equal numbers of sequences at nearly equal cost, and groups that fit stay whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.tries import Batch, batches
from tests.support import num_calls
from verl_pg_plugin.layout import PrefixOrder, build_prefix_order
from verl_pg_plugin.mixers import PairCost
from verl_pg_plugin.planning import balance
from verl_pg_plugin.planning.balance import Balance, balance_groups, order_by_sessions
from verl_pg_plugin.planning.cost import ModelFlops

# Half the layers of a 7B model with a window, half without; the head.
FLOPS = ModelFlops(1.4e10, 1.2e9, (PairCost(2.6e5), PairCost(2.6e5, window=4096)))


@dataclass(frozen=True)
class Problem:
    """B sequences in groups, and how many bins (rank x mini-batch) they go to."""

    group: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    num_ranks: int
    num_mini_batches: int

    def solve(self, may_cut: bool = True) -> Balance:
        rows = np.arange(len(self.group))
        order = order_by_sessions(self.group, rows, np.zeros_like(rows), self.prompt_lengths, self.response_lengths)
        shape = self.num_ranks, self.num_mini_batches
        with patch.object(balance, "LEVEL", balance.LEVEL if may_cut else np.inf):
            return balance_groups(order, self.group, self.response_lengths, FLOPS.segments, *shape)

    def bins(self, order: np.ndarray) -> list[np.ndarray]:
        return np.split(order, self.num_ranks * self.num_mini_batches)

    def cost(self, held: np.ndarray) -> float:
        """Forward FLOPs of a packed layout: prompts once and one token shorter than they are."""
        prompts = {int(self.group[s]): int(self.prompt_lengths[s]) for s in held}
        segments = [
            *((0, p - 1, 0) for p in prompts.values()),
            *((self.prompt_lengths[s] - 1, self.response_lengths[s], self.response_lengths[s]) for s in held),
        ]
        return float(FLOPS.segments(*np.array(segments).T).sum())


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_ranks, num_mini_batches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = num_ranks * num_mini_batches * draw(st.integers(1, 6))
    group = np.array(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    prompt_of = np.array(draw(st.lists(st.integers(1, 9000), min_size=6, max_size=6)))
    responses = np.array(draw(st.lists(st.integers(1, 30000), min_size=size, max_size=size)))
    return Problem(group, prompt_of[group], responses, num_ranks, num_mini_batches)


def grpo(num_groups: int, n: int, num_ranks: int, num_mini_batches: int = 1) -> Problem:
    """Groups of n with long-tailed lengths, samples shuffled."""
    generator = np.random.default_rng(0)
    group = generator.permutation(np.repeat(np.arange(num_groups), n))
    prompts = generator.integers(200, 4000, num_groups)[group]
    responses = np.minimum(generator.lognormal(6.5, 1.0, len(group)).astype(np.int64) + 1, 8192)
    return Problem(group, prompts, responses, num_ranks, num_mini_batches)


def test_sequences_of_one_token_cost_nothing_and_batches_must_divide() -> None:
    ones = np.ones(4, dtype=np.int64)
    balance = Problem(np.array([0, 0, 1, 1]), ones, 0 * ones, num_ranks=2, num_mini_batches=1).solve()
    assert (balance.time, balance.slowest_over_mean) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"4 sequences do not divide into 2 ranks x 3 mini-batches"):
        Problem(ones, ones, ones, num_ranks=2, num_mini_batches=3).solve()


@given(problems())
def test_order_is_a_permutation_with_the_reported_costs_and_cuts(problem: Problem) -> None:
    balance = problem.solve()
    assert sorted(balance.order.tolist()) == list(range(len(problem.group)))
    bins = problem.bins(balance.order)
    assert balance.cost.ravel().tolist() == pytest.approx([problem.cost(held) for held in bins])
    waits = balance.cost.max(axis=0).sum() * problem.num_ranks
    assert balance.slowest_over_mean == pytest.approx(waits / balance.cost.sum())
    bins_of = [sum(bool((problem.group[held] == g).any()) for held in bins) for g in np.unique(problem.group)]
    assert sum(number > 1 for number in bins_of) == balance.num_cut_groups
    parts_of = [int(np.count_nonzero(np.diff(problem.group[held]))) + 1 for held in bins]
    assert parts_of == [len(np.unique(problem.group[held])) for held in bins], (
        "groups are contiguous: a critic cuts bins"
    )
    by_mini_batch = [bins[j :: problem.num_mini_batches] for j in range(problem.num_mini_batches)]
    firsts = [min(int(held.min()) for held in mini_batch) for mini_batch in by_mini_batch]
    assert firsts == sorted(firsts), "mini-batches keep their order"
    expensive_first = np.sort(balance.cost, axis=None)[::-1]
    assert balance.time == pytest.approx(expensive_first[:: problem.num_ranks].sum()), "similar bins make a mini-batch"


@pytest.mark.parametrize(("num_ranks", "num_mini_batches"), [(1, 1), (8, 4), (64, 1)])
def test_groups_that_fit_are_cut_only_to_save_time(num_ranks: int, num_mini_batches: int) -> None:
    problem = grpo(64, 8, num_ranks, num_mini_batches)
    whole, cut = problem.solve(may_cut=False), problem.solve()
    assert whole.num_cut_groups == 0
    assert (cut.num_cut_groups > 0) == (cut.time < whole.time), "a cut has to pay"


@pytest.mark.parametrize(("num_groups", "n"), [(128, 8), (8192, 1)])
def test_ranks_finish_together_without_trying_all_exchanges(num_groups: int, n: int) -> None:
    """8,192 groups on 8 ranks have a million pairs with each other rank."""
    problem = grpo(num_groups, n, num_ranks=8)
    balances: list[Balance] = []
    assert num_calls(lambda: balances.append(problem.solve())) < 100_000
    assert balances[0].slowest_over_mean < 1.001


@pytest.mark.parametrize(
    ("lengths", "sums"),
    [
        # Dealing each to the cheapest rank with room gives 90 68 1 and 70 69 40.
        ([90, 70, 69, 68, 40, 1], [161, 177]),
        # An exchange must not make the cheap rank the slowest.
        ([60, 30, 40, 10, 10, 10, 20, 90, 80], [110, 120, 120]),
    ],
)
def test_groups_are_exchanged_between_ranks_of_unequal_cost(lengths: list, sums: list) -> None:
    responses, ones = np.array(lengths) * 100, np.ones(len(lengths), dtype=np.int64)
    balance = Problem(np.arange(len(lengths)), ones, responses, len(sums), 1).solve(may_cut=False)
    assert sorted(responses[rank].sum() // 100 for rank in np.split(balance.order, len(sums))) == sums


def test_groups_larger_than_a_mini_batch_are_cut_into_few_parts() -> None:
    group = np.array([0] * 6 + [1, 2])
    problem = Problem(group, np.full(8, 10), np.full(8, 10), num_ranks=2, num_mini_batches=1)
    balance = problem.solve()
    assert balance.num_cut_groups == 1
    assert sorted(np.bincount(group[held], minlength=3).tolist() for held in problem.bins(balance.order)) in (
        [[2, 1, 1], [4, 0, 0]],
        [[3, 0, 1], [3, 1, 0]],
    )


def test_groups_are_cut_if_that_saves_more_than_the_prompt_costs() -> None:
    """With one group of 64 long-tailed responses for each rank, whole groups leave one rank far above the mean."""
    problem = grpo(64, 64, num_ranks=64)
    whole, cut = problem.solve(may_cut=False), problem.solve()
    ideal = whole.cost.mean()
    assert whole.time > 1.3 * ideal
    assert cut.slowest_over_mean < 1.05
    assert cut.time < 1.08 * ideal, "including prompts computed twice"
    prompts, responses = np.array([1, 1, 1, 1, 1, 1, 5, 5]), np.array([6, 1, 4, 2, 2, 2, 5, 2])
    few = Problem(np.array([0, 0, 0, 1, 1, 1, 2, 2]), 1000 * prompts, 1000 * responses, 2, 2)
    assert few.solve().time <= few.solve(may_cut=False).time, "where it pays"


def test_ranks_have_equal_cost_over_all_mini_batches() -> None:
    """Passes without gradients wait once, at the end of the batch."""
    problem = Problem(np.arange(4), np.ones(4, dtype=np.int64), np.array([10, 9, 8, 7]) * 1000, 2, 2)
    totals = [int(problem.response_lengths[rank].sum()) for rank in np.split(problem.solve().order, 2)]
    assert sorted(totals) == [17000, 17000]


def price(start: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return 3.0 * tokens + 0.01 * ((start + tokens) ** 2 - start**2) + 50.0 * labels


@given(batches(), st.data())
def test_cost_of_any_sequences_matches_their_layout(batch: Batch, data: st.DataObject) -> None:
    order, ones = batch.order(), np.ones(len(batch.sequences), dtype=np.int64)
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, len(ones) - 1), min_size=1))))
    alone = batch.take(order.sequences[chosen]).order()
    labels, together = np.minimum(1, alone.num_new), order.subset(chosen)
    cost = price(together.num_shared, together.num_new, np.minimum(1, together.num_new)).sum()
    assert cost == pytest.approx(price(alone.num_shared, alone.num_new, labels).sum())
    assert together.num_new.sum() == alone.num_new.sum()
    one = balance_groups(order, np.zeros_like(ones), ones, price, num_ranks=1)
    assert one.time == pytest.approx(price(order.num_shared, order.num_new, np.minimum(1, order.num_new)).sum())
    assert one.num_tokens == order.num_new.sum()


class Rollouts:
    """Rows of sessions, with their tokens, which the driver does not see."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.columns: list[tuple[int, int, int, int, int]] = []
        self.tokens: list[np.ndarray] = []

    def draw(self, length: int) -> np.ndarray:
        return self.rng.integers(1_000_000, size=length)

    def session(self, group: int, session: int, prompt: np.ndarray, turns: Sequence[tuple[int, int]]) -> None:
        """Add one row for each turn of (reply, tool output) tokens."""
        context = prompt
        for place, (reply, tool) in enumerate(turns):
            self.row(group, session, place, context, self.draw(reply))
            context = np.concatenate([self.tokens[-1], self.draw(tool)])

    def row(self, group: int, session: int, place: int, prompt: np.ndarray, response: np.ndarray) -> None:
        self.columns.append((group, session, place, len(prompt), len(response)))
        self.tokens.append(np.concatenate([prompt, response]))

    def estimated(self) -> PrefixOrder:
        return order_by_sessions(*np.array(self.columns).T)

    def real(self) -> PrefixOrder:
        offsets = np.append(0, np.cumsum([len(tokens) for tokens in self.tokens]))
        return build_prefix_order(np.concatenate(self.tokens), offsets, classes=np.array(self.columns)[:, 0])


def test_estimated_sharing_of_sessions_and_edited_contexts_matches_tokens() -> None:
    rollouts = Rollouts()
    for group in (3, 1):
        prompt = rollouts.draw(300)
        for session in range(4):
            rollouts.session(group, session, prompt, [(20, 50)] * (1 + session))
    estimated, real = rollouts.estimated(), rollouts.real()
    assert estimated.num_new.sum() == real.num_new.sum()
    groups, *_, responses = np.array(rollouts.columns).T
    costs = [balance_groups(o, groups, responses, FLOPS.segments, num_ranks=1).time for o in (estimated, real)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-3)
    assert groups[estimated.sequences].tolist() == [3] * 10 + [1] * 10, "in batch order"
    rollouts = Rollouts()
    prompt = rollouts.draw(300)
    rollouts.session(0, 0, prompt, [(20, 500), (20, 500)])
    rollouts.row(0, 0, 2, np.concatenate([prompt, rollouts.draw(100)]), rollouts.draw(20))
    rollouts.row(0, 0, 3, np.concatenate([rollouts.tokens[-1], rollouts.draw(500)]), rollouts.draw(20))
    estimated = rollouts.estimated()
    assert estimated.num_new.sum() == rollouts.real().num_new.sum()
    assert estimated.num_shared.tolist() == [0, 319, 299, 419]
