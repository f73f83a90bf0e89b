"""Options over several processes: FSDP2 on 1, 2 and 4, Ulysses sequence parallelism, hybrid sharding.

One spawn runs all cases of a number of processes: a process takes longer to start than a case to run.
"""

import traceback

import pytest

from tests.engine.ranks import on_ranks
from tests.options.harness import Checkpoint, Engines, assert_exact
from tests.options.option import Case, alone, pairs
from tests.options.table import OPTIONS

QUICK = [option for option in OPTIONS if not option.needs_gpu and not option.slow]
UP_TO_TWO = [option for option in QUICK if option.num_ranks <= 2]
ON_TWO = [*alone(UP_TO_TWO), *(case for case in pairs(UP_TO_TWO) if case.num_ranks == 2)]
ON_FOUR = [
    *alone(option for option in QUICK if option.num_ranks != 1 or option.is_default),
    *(case for case in pairs(QUICK) if case.num_ranks == 4),
]


def errors_on_rank(rank: int, checkpoint: Checkpoint, size: int) -> list[str]:
    """What is wrong with each case on this rank, empty where nothing is."""
    engines, errors = Engines(checkpoint), []
    for case in {2: ON_TWO, 4: ON_FOUR}[size]:
        try:
            assert_exact(case, engines)
            errors.append("")
        except Exception:
            errors.append(f"rank {rank}: {traceback.format_exc()}")
    return errors


def run_all(size: int, checkpoint: Checkpoint, cases: list[Case]) -> dict[str, str]:
    by_rank = on_ranks(size, errors_on_rank, checkpoint, size)
    return {str(case): "\n".join(filter(None, errors)) for case, *errors in zip(cases, *by_rank, strict=True)}


@pytest.fixture(scope="module")
def two(checkpoint: Checkpoint) -> dict[str, str]:
    return run_all(2, checkpoint, ON_TWO)


@pytest.fixture(scope="module")
def four(checkpoint: Checkpoint) -> dict[str, str]:
    return run_all(4, checkpoint, ON_FOUR)


@pytest.mark.parametrize("case", ON_TWO, ids=str)
def test_two_processes_keep_the_numbers(case: Case, two: dict[str, str]) -> None:
    assert not two[str(case)], two[str(case)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_FOUR, ids=str)
def test_four_processes_keep_the_numbers(case: Case, four: dict[str, str]) -> None:
    assert not four[str(case)], four[str(case)]
