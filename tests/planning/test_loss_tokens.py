"""Sequences without a loss token join others: none is lost, and ranks run equal numbers of micro-batches."""

from typing import Any

import numpy as np

from tests.layout.tries import batch_of
from verl_pg_plugin.planning.activation_policy import CacheWeights
from verl_pg_plugin.planning.loss_tokens import cut_for_loss
from verl_pg_plugin.planning.micro_batches import MicroBatchLimits

FREE = CacheWeights()


def members(*args: Any, **options: Any) -> list[list[int]]:
    return [part.sequences for group in cut_for_loss(*args, **options) for part in group]


def test_small_groups_without_a_loss_token_join_others() -> None:
    """verl pads batches with copies of such sequences, and some of its losses fail on them alone."""
    order = batch_of(*[((7, 2), (i,) * 20) for i in range(4)], ((7, 9, 9), (9,))).order()
    has_loss = np.array([1, 1, 1, 1, 0])
    for at_least in (1, 2, 4):
        plan = members(order, has_loss, MicroBatchLimits(max_tokens=82), FREE, at_least=at_least)
        assert sorted(np.concatenate(plan)) == [0, 1, 2, 3, 4]
        assert [has_loss[sequences].any() for sequences in plan] == [True] * at_least
    fillers = batch_of(*[((i, i), (i,) * 99) for i in range(2)], *[((9,), (9,))] * 3).order()
    for at_least in (2, 3, 4, 5):
        plan = members(fillers, np.array([1, 1, 0, 0, 0]), MicroBatchLimits(max_sequences=1), FREE, at_least=at_least)
        assert len(plan) == at_least, "equal numbers on all ranks"


def test_large_groups_without_a_loss_token_are_spread() -> None:
    masked = [((0, 1), (i,) * 400) for i in range(8)]
    order = batch_of(*masked, *[((g, g), (i,) * 150) for g in range(2, 9) for i in range(8)]).order()
    has_loss = np.arange(64) >= 8
    for most in (1600, 2400, 4096, 6144):
        plan = members(order, has_loss, MicroBatchLimits(max_tokens=most), None)
        assert sorted(np.concatenate(plan)) == [*range(64)]
        assert all(has_loss[sequences].any() for sequences in plan)
        places = [np.flatnonzero(np.isin(order.sequences, sequences)) for sequences in plan]
        assert max(order.subset(of).num_new.sum() for of in places) <= 9 * most / 8


def test_masked_groups_that_do_not_fit_add_micro_batches() -> None:
    """Stock verl mixes sequences too, so it has no micro-batch without a loss token."""
    for masked, own, most in ((50, 20, 100), (100, 30, 200)):
        order = batch_of(*[((g, g), (i,) * n) for g, n in enumerate((masked, own)) for i in range(4)]).order()
        for weights in (None, FREE):
            plan = members(order, np.repeat([0, 1], 4), MicroBatchLimits(max_tokens=most), weights)
            assert sorted(np.concatenate(plan)) == [*range(8)]
            assert all(max(sequences) >= 4 for sequences in plan)
    partly = batch_of(*[((g,) * 39, (i,) * n) for g, n in enumerate((12, 26)) for i in range(4)]).order()
    plan = members(partly, np.array([0, 0, 0, 0, 1, 0, 1, 0]), MicroBatchLimits(max_tokens=151), FREE)
    assert len(plan) == 2, "a third would have no loss token"
    # A masked group without room elsewhere is its own micro-batch.
    order = batch_of(((9,) * 8, (1,)), *[((2,), (i,) * 5) for i in range(3)]).order()
    assert sorted(members(order, np.array([0, 1, 1, 1]), MicroBatchLimits(max_tokens=8), FREE)) == [[0], [1], [2], [3]]


def test_ranks_run_equal_numbers_if_a_masked_group_does_not_fit() -> None:
    groups = [(8, 4, 20), (8, 6, 60), (1, 4, 5), (8, 3, 5)]  # tokens of the prompt, responses, tokens of each
    pairs = [((g,) * prompt, (100 + i,) * own) for g, (prompt, n, own) in enumerate(groups) for i in range(n)]
    order, has_loss = batch_of(*pairs).order(), np.repeat([0, 1, 0, 0], [n for _, n, _ in groups])
    for at_least in (6, 7, 8):
        assert len(members(order, has_loss, MicroBatchLimits(max_tokens=87), FREE, at_least=at_least)) == at_least
