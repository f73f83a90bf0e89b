"""Compiled layers over two processes, with what else changes the weights or the rows of a rank."""

import traceback

import pytest

from tests.engine.ranks import on_ranks
from tests.options.harness import Checkpoint, Engines, assert_exact
from tests.options.option import Case, Place
from tests.options.table import OPTIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

(COMPILED,) = (option for option in OPTIONS if option.name == "compiled layers")
CASES = [
    Case((COMPILED, option))
    for option in OPTIONS
    if Place.WEIGHTS in option.meets and option.num_ranks <= 2 and not option.needs_gpu and option.runs
]
"""Sharded weights, offload, adapters, Ulysses."""


def errors_on_rank(rank: int, checkpoint: Checkpoint) -> list[str]:
    """What is wrong with each case on this rank, empty where nothing is."""
    engines, errors = Engines(checkpoint), []
    for case in CASES:
        try:
            assert_exact(case, engines)
            errors.append("")
        except Exception:
            errors.append(f"rank {rank}: {traceback.format_exc()}")
    return errors


@pytest.fixture(scope="module")
def two(checkpoint: Checkpoint) -> dict[str, str]:
    by_rank = on_ranks(2, errors_on_rank, checkpoint)
    return {str(case): "\n".join(filter(None, errors)) for case, *errors in zip(CASES, *by_rank, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_with_compiled_layers_keep_the_numbers(case: Case, two: dict[str, str]) -> None:
    assert not two[str(case)], two[str(case)]
