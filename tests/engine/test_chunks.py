"""Groups split over micro-batches match single sequences."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.batches import Sample, make_batch

from tests.engine.carried_cases import CASES, DUPLICATES, MIXED, ONE_GROUP, trie
from tests.engine.ranks import check_exact_on_ranks
from tests.engine.test_exactness import WINDOW
from tests.support import check_exact, clone, critic_batch, group, make_engine, save_tiny_model, split_always
from verl_pg_plugin.planning.activation_policy import CacheWeights


def by_sequences(number: int) -> dict[str, Any]:
    return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": number}


@pytest.fixture(scope="module")
def engine(qwen3: str) -> Any:
    return make_engine(qwen3, splits=True)


SMALL = [*group(6, [7, 1], 3), *group(9, [4, 4], 2)]
BATCHES = {
    case: make_batch(samples, max_token_len_per_gpu=budget, calculate_sum_pi_squared=True)
    for case, (samples, budget) in CASES.items()
}
BATCHES["groups above a number of sequences"] = make_batch([*SMALL[:2], *ONE_GROUP, *SMALL[2:]], **by_sequences(3))
BATCHES["a chunk that begins with a duplicate"] = make_batch(DUPLICATES, **by_sequences(2))


@pytest.mark.parametrize("case", BATCHES)
def test_split_groups_match_single_sequences(qwen3: str, engine: Any, case: str) -> None:
    """See tests/options for options, and tests/architectures and tests/mixers for other layers."""
    check_exact(engine, qwen3, BATCHES[case], splits=True)


@pytest.mark.parametrize("model", ["windows", "values"])
def test_split_groups_with_sliding_windows_and_of_critics_are_exact(value_model, tmp_path: Path, model: str) -> None:
    critic = model == "values"
    path, make = (value_model, critic_batch) if critic else (save_tiny_model(tmp_path, **WINDOW), make_batch)
    engine = make_engine(path, critic=critic, splits=True)
    check_exact(engine, path, make(MIXED, max_token_len_per_gpu=56), splits=True)


@pytest.mark.parametrize(("owed", "splits"), [(0.75, True), (1.5, False)])
def test_a_fixed_micro_batch_size_bounds_the_memory_of_the_cache(qwen3: str, owed: float, splits: bool) -> None:
    engine = make_engine(qwen3)
    split_always(engine, CacheWeights(cached=0.5, published=owed, alone=0.5))
    plan = engine.plan(clone(make_batch(ONE_GROUP, **by_sequences(1))), forward_only=False)
    assert (plan.num_split_groups > 0) == splits


TRIE = trie()
SECOND = group(18, [6, 9, 5, 8, 7, 6, 9, 4], 21)
RANKS: dict[str, tuple[list[Sample], list[Sample]]] = {
    "two against none": ([*ONE_GROUP, *TRIE], [*SMALL, *SECOND[:3]]),
    "two against one": ([*ONE_GROUP, *TRIE], [*SMALL, *SECOND]),
    "one against two in fewer micro-batches": (ONE_GROUP, [*TRIE, *SMALL, *SECOND]),
}
"""Samples of the two ranks, by the number of groups that exceed a micro-batch on each."""
TWO_BY_TWO = {"ulysses_sequence_parallel_size": 2, "fsdp_size": 2}
"""Two data-parallel ranks of two Ulysses ranks each, with hybrid sharding."""


@pytest.mark.parametrize(
    ("split", "options"),
    [
        *((split, {}) for split in RANKS),
        ("two against one", {"strategy": "fsdp"}),
        pytest.param("two against one", {"engine": TWO_BY_TWO, "num_ranks": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_with_unequal_numbers_of_oversized_groups_are_exact(qwen3: str, split: str, options: dict) -> None:
    """tests/options/test_ranks.py has Ulysses alone."""
    first, second = RANKS[split]
    make = partial(make_batch, [*first, *second], max_token_len_per_gpu=28 if "engine" in options else 56)
    parts = [list(range(len(first))), list(range(len(first), len(first) + len(second)))]
    check_exact_on_ranks(qwen3, make, parts, splits=True, **options)
