"""Ranks with different numbers of oversized groups export together, and Ulysses ranks carry their own heads."""

from typing import Any

import pytest
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.engine.carried_cases import CASES, MIXED, ONE_GROUP, carrying, carrying_engine, trie
from tests.engine.ranks import on_ranks
from tests.support import (
    Result,
    assert_same,
    fsdp1_takes_models_on_a_cpu,
    group,
    run_engine,
    run_reference,
)
from verl_pg_plugin.synthetic import make_batch

TRIE, SECOND = trie(), group(18, [6, 9, 5, 8, 7, 6, 9, 4], 21)
SMALL = [*group(6, [7, 1], 3), *group(9, [4, 4], 2)]
BUDGET = CASES["small_groups_beside_large_ones"][1]
SPLITS = {
    "two against none": ([*ONE_GROUP, *TRIE], [*SMALL, *SECOND[:3]]),
    "two against one": ([*ONE_GROUP, *TRIE], [*SMALL, *SECOND]),
    "one against two in fewer micro-batches": (ONE_GROUP, [*TRIE, *SMALL, *SECOND]),
}
"""Samples of the two ranks, by the number of groups that exceed a micro-batch on each."""
STRATEGIES = {"fsdp2": list(SPLITS), "fsdp": ["two against one"]}
RUNS = [(strategy, split) for strategy, splits in STRATEGIES.items() for split in splits]


def batch_of(split: str, tokens: int = BUDGET) -> TensorDict:
    """Of both ranks."""
    first, second = SPLITS[split]
    return make_batch([*first, *second], max_token_len_per_gpu=tokens)


def part(split: str, rank: int) -> list[int]:
    """Which of its sequences a rank has."""
    first, second = map(len, SPLITS[split])
    return list(range(first, first + second) if rank else range(first))


def run_splits(rank: int, path: str) -> dict[tuple[str, str], Result]:
    """Results of every split."""
    fsdp1_takes_models_on_a_cpu()
    engines = {strategy: carrying_engine(path, strategy=strategy) for strategy in STRATEGIES}
    results = {}
    for strategy, split in RUNS:
        with carrying(engines[strategy]):
            local = tu.index_select_tensor_dict(batch_of(split), part(split, rank))
            results[strategy, split] = run_engine(engines[strategy], local)
    return results


@pytest.fixture(scope="module")
def results(qwen3: str) -> list[dict[tuple[str, str], Result]]:
    return on_ranks(2, run_splits, qwen3)


@pytest.mark.parametrize(("strategy", "split"), RUNS)
def test_ranks_with_unequal_numbers_of_oversized_groups_are_exact(
    qwen3: str, results: list[dict[tuple[str, str], Result]], strategy: str, split: str
) -> None:
    expected = run_reference(qwen3, batch_of(split))
    for rank, found in enumerate(results):
        assert_same(found[strategy, split], expected.of_rank(part(split, rank)))


def run_ulysses(rank: int, path: str) -> Any:
    engine = carrying_engine(path, engine={"ulysses_sequence_parallel_size": 2})
    with carrying(engine):
        return run_engine(engine, make_batch(MIXED, max_token_len_per_gpu=BUDGET // 2))


def test_ulysses_ranks_carry_the_keys_of_their_heads(qwen3: str) -> None:
    expected = run_reference(qwen3, make_batch(MIXED))
    for result in on_ranks(2, run_ulysses, qwen3):
        assert_same(result, expected)


def run_hybrid(rank: int, path: str, split: str) -> tuple[list[int], Result]:
    """Two data-parallel ranks of two sequence-parallel ones each, weights sharded over two and replicated twice."""
    engine = carrying_engine(path, engine={"ulysses_sequence_parallel_size": 2, "fsdp_size": 2})
    mine = part(split, engine.get_data_parallel_rank())
    with carrying(engine):
        return mine, run_engine(engine, tu.index_select_tensor_dict(batch_of(split, 28), mine))


@pytest.mark.slow
def test_sequence_and_data_parallel_ranks_carry_together(qwen3: str) -> None:
    split = "two against one"
    expected = run_reference(qwen3, batch_of(split))
    for mine, result in on_ranks(4, run_hybrid, qwen3, split):
        assert_same(result, expected.of_rank(mine))
