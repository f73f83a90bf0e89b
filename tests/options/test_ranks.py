"""Options over several processes: FSDP2 on 1, 2 and 4, Ulysses sequence parallelism, hybrid sharding, compiled layers.

The processes of a number of ranks run all of its cases: a process takes longer to start than a case to run.
"""

import pytest

from tests.engine.ranks import on_ranks
from tests.options.harness import Checkpoint, Engines, assert_exact, by_case, errors_of
from tests.options.option import Case, Option, Place, alone, covering, pairs
from tests.options.table import OPTIONS, case_of

ON_CPU = [option for option in OPTIONS if not option.needs_gpu]
QUICK = [option for option in ON_CPU if not option.compiles]


def up_to(num_ranks: int, options: list[Option]) -> list[Option]:
    return [option for option in options if option.num_ranks <= num_ranks]


CASES = {
    "two": [
        *covering(pairs(up_to(1, QUICK))),
        *covering([case for case in pairs(up_to(2, QUICK)) if case.num_ranks == 2]),
    ],
    "four": [
        *alone(option for option in QUICK if option.num_ranks != 1 or option.is_default),
        *(case for case in pairs(QUICK) if case.num_ranks == 4),
    ],
    # With what changes the weights or the tokens of a rank: sharding, offload, adapters, Ulysses.
    "two, compiled layers": [
        Case((*case_of("compiled layers").options, option))
        for option in up_to(2, ON_CPU)
        if Place.WEIGHTS in option.meets
    ],
}
PARAMETERS = [
    pytest.param(ranks, case, id=f"{ranks}: {case}", marks=[] if ranks == "two" else [pytest.mark.slow])
    for ranks, cases in CASES.items()
    for case in cases
]
FOUND: dict[str, dict[str, str]] = {}


def errors_on_rank(rank: int, checkpoint: Checkpoint, ranks: str) -> list[str]:
    engines = Engines(checkpoint)
    return errors_of(rank, CASES[ranks], lambda case: assert_exact(case, engines))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "case"), PARAMETERS)
def test_several_processes_keep_the_numbers(ranks: str, case: Case, checkpoint: Checkpoint) -> None:
    if ranks not in FOUND:
        by_rank = on_ranks(4 if ranks == "four" else 2, errors_on_rank, checkpoint, ranks)
        FOUND[ranks] = by_case(CASES[ranks], by_rank)
    assert not FOUND[ranks][str(case)], FOUND[ranks][str(case)]
