"""Ranks with different numbers of oversized groups export together, and Ulysses ranks carry their own heads."""

from typing import Any

import pytest
from verl.utils import tensordict_utils as tu

from tests.engine.carried_cases import CASES, MIXED, ONE_GROUP, carrying_engine, trie
from tests.engine.ranks import on_ranks
from tests.support import Result, actor_loss, assert_same, clone, group, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

TRIE, SECOND = trie(), group(18, [6, 9, 5, 8, 7, 6, 9, 4], 21)
SAMPLES = [*ONE_GROUP, *TRIE, *group(6, [7, 1], 3), *group(9, [4, 4], 2), *SECOND]
ONE, OF_TRIE, SMALL, TWO = (
    list(range(start, stop)) for start, stop in ((0, 8), (8, 8 + len(TRIE)), (36, 40), (40, len(SAMPLES)))
)
SPLITS = {
    "two against none": ([*ONE, *OF_TRIE], [*SMALL, *TWO[:3]]),
    "two against one": ([*ONE, *OF_TRIE], [*SMALL, *TWO]),
    "one against two in fewer micro-batches": (ONE, [*OF_TRIE, *SMALL, *TWO]),
}
"""Samples of the two ranks, by the number of groups that exceed a micro-batch on each."""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"))


def used(split: str) -> list[int]:
    return sorted(row for rows in SPLITS[split] for row in rows)


def run_splits(rank: int, path: str) -> dict[str, Result]:
    engine = carrying_engine(path)
    results = {}
    for split, rows in SPLITS.items():
        batch = make_batch([SAMPLES[row] for row in used(split)], max_token_len_per_gpu=56)
        local = tu.index_select_tensor_dict(batch, [used(split).index(row) for row in rows[rank]])
        results[split] = run_engine(engine, clone(local), actor_loss())
    return results


@pytest.fixture(scope="module")
def results(qwen3: str) -> list[dict[str, Result]]:
    return on_ranks(2, run_splits, qwen3)


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_with_unequal_numbers_of_oversized_groups_are_exact(
    qwen3: str, results: list[dict[str, Result]], split: str
) -> None:
    batch = make_batch([SAMPLES[row] for row in used(split)], max_token_len_per_gpu=56)
    expected = run_reference(qwen3, batch, actor_loss())
    for rank, rows in enumerate(SPLITS[split]):
        mine = [used(split).index(row) for row in rows]
        outputs = {name: [values[i] for i in mine] for name, values in expected.outputs.items()}
        assert_same(results[rank][split], Result(outputs, expected.gradients))


def run_ulysses(rank: int, path: str, sp_size: int) -> Any:
    engine = carrying_engine(path, engine={"ulysses_sequence_parallel_size": sp_size})
    return run_engine(engine, make_batch(MIXED, max_token_len_per_gpu=CASES_BUDGET // sp_size), actor_loss())


CASES_BUDGET = CASES["small_groups_beside_large_ones"][1]


@pytest.mark.parametrize("sp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ulysses_ranks_carry_the_keys_of_their_heads(qwen3: str, sp_size: int) -> None:
    expected = run_reference(qwen3, make_batch(MIXED), actor_loss())
    for result in on_ranks(sp_size, run_ulysses, qwen3, sp_size):
        assert_same(result, expected)
