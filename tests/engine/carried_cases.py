"""Batches whose groups exceed a micro-batch, and engines that carry prefixes too short to be worth it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from tensordict import TensorDict

from tests.support import clone, group, make_engine
from verl_pg_plugin.engine import plan as plan_module
from verl_pg_plugin.engine.plan import Plan
from verl_pg_plugin.planning.micro_batches import CacheWeights, MicroBatch, cut_micro_batches
from verl_pg_plugin.synthetic import Sample

SYSTEM, TURN = list(range(5)), list(range(40, 52))


def trie() -> list[Sample]:
    """Three levels with labels on inner rows: a first turn, branches, branches of branches."""
    rng = np.random.default_rng(3)
    samples = []
    for _ in range(3):
        turn = rng.integers(97, size=9).tolist()
        for _ in range(3):
            second = rng.integers(97, size=6).tolist()
            for _ in range(3):
                tail = rng.integers(97, size=int(rng.integers(2, 7))).tolist()
                samples.append(Sample([*SYSTEM, *range(60, 66)], [*TURN, *turn, *second, *tail]))
    # A prompt that reaches into the others' response: rows that are a label here and prompt there.
    samples.append(Sample([*SYSTEM, *range(60, 66), *TURN[:6]], [3, 1, 4]))
    return [samples[i] for i in np.random.default_rng(0).permutation(len(samples))]


ONE_GROUP = group(20, [6, 9, 5, 8, 7, 6, 9, 4], 1)
DUPLICATES = [Sample(range(20), r) for r in (*[[7, 8, 9, 10]] * 3, [30, 31], [40, 41, 3], [50, 51])]
NESTED = [
    Sample(range(30), response)
    for response in ([1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2], [7, 8], [7, 8], [7, 8], [7], [9, 1, 2, 3])
]
MIXED = [*group(6, [7, 1], 3), *ONE_GROUP, *group(9, [4, 4], 2), *trie(), *group(5, [3], 9)]
TURNS = [
    Sample(whole[: 6 * k + 3], whole[6 * k + 3 : 6 * k + 6])
    for whole in (list(range(54)), [*range(30), *range(60, 84)])
    for k in range(9)
]
TOOL_TOKENS = [replace(s, mask=[i % 3 > 0 for i in range(len(s.response))]) for s in trie()]

TEMPLATE = [  # two tokens: a short prefix of a budget of 130, which groups and a short prompt share
    Sample([1, 2, *s.prompt], s.response)
    for s in (*group(40, [30, 25, 28, 21], 1), *group(35, [33, 27, 30, 24], 2), *group(3, [5, 4], 3))
]

CASES: dict[str, tuple[list[Sample], int]] = {
    "one_group_of_8": (ONE_GROUP, 36),
    "a_trie_of_three_levels": (trie(), 56),
    "small_groups_beside_large_ones": (MIXED, 56),
    "a_prompt_that_nearly_fills_the_budget": (group(33, [3, 4, 2, 4], 7), 38),
    "equal_and_nested_responses": (NESTED, 36),
    "turns_of_two_sessions_that_part": (TURNS, 56),
    "tool_tokens": (TOOL_TOKENS, 60),
    "groups_behind_a_chat_template": (TEMPLATE, 130),
}
"""Samples, and the token budget of a micro-batch."""


def carrying_engine(path: str, weights: CacheWeights = CacheWeights(), **options: Any) -> Any:  # noqa: B008
    """``make_engine`` in packed mode, carrying whatever it can: the prefixes of tests are short."""
    engine = make_engine(path, **options)
    carry_always(engine, weights)
    return engine


def carry_always(engine: Any, weights: CacheWeights = CacheWeights()) -> None:  # noqa: B008
    """Let an engine in packed mode carry prefixes however short."""
    plan, cut = engine.plan, partial(cut_micro_batches, micro_batch_cost=4.0)

    def plan_cheap_micro_batches(data: TensorDict, forward_only: bool) -> Plan:
        with patch.object(plan_module, "cut_micro_batches", cut):
            return plan(data, forward_only)

    engine._cache_weights, engine.plan = lambda levels, forward_only: weights, plan_cheap_micro_batches


def split_groups(engine: Any, batch: TensorDict, forward_only: bool) -> list[list[MicroBatch]]:
    """The chunks of each group that goes on from micro-batch to micro-batch on this rank."""
    return [group for group in engine.plan(clone(batch), forward_only).groups if len(group) > 1]


@contextmanager
def carrying(engine: Any) -> Iterator[None]:
    """Fails unless each mini-batch that ``engine`` runs in the block has chains on some rank."""
    run, chains = engine.forward_backward_batch, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        chains.extend(output["metrics"]["prefix_grouper/chains"])
        return output

    engine.forward_backward_batch = counted
    try:
        yield
    finally:
        engine.forward_backward_batch = run
    assert chains
    assert all(chains), "nothing was carried, so nothing was shown"
