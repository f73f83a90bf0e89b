"""Options over several processes: FSDP2 and FSDP1, Ulysses sequence parallelism, hybrid sharding, compiled layers.

The processes of a number of ranks run all of its cases: a process takes longer to start than a case to run.
"""

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.utils import counters

from tests.engine.ranks import graphs_as_they_are, on_ranks
from tests.options.harness import Checkpoint, Engines, assert_exact, by_case, errors_of
from tests.options.option import Case, Option, Place, alone, covering, pairs
from tests.options.table import OPTIONS, case_of
from tests.support import fsdp1_takes_models_on_a_cpu

ON_CPU = [option for option in OPTIONS if not option.needs_gpu]
QUICK = [option for option in ON_CPU if not option.compiles]


def up_to(num_ranks: int, options: list[Option]) -> list[Option]:
    return [option for option in options if option.num_ranks <= num_ranks]


COMPILED = Option("compiled layers of FSDP1", "", engine={"strategy": "fsdp", "compile_layers": True})
UNCOMPILED = Option("layers of FSDP1", "", engine={"strategy": "fsdp"})
# Of FSDP2 alone, and for GPUs alone: verl puts FSDP1's weights back on a device with a number.
NOT_FSDP1 = {"FSDP2 offload policy", "parameter offload"}
OF_FSDP1 = [option for option in up_to(2, QUICK) if not (option.is_default or option.name in NOT_FSDP1)]
# By compiled layers, but for adapters, which are refused.
SEEN = [o for o in OF_FSDP1 if o.meets & {Place.TOKENS, Place.LAYERS, Place.WEIGHTS} and o.name != "LoRA"]

CASES = {
    "two": [
        *covering(pairs(up_to(1, QUICK))),
        *covering([case for case in pairs(up_to(2, QUICK)) if case.num_ranks == 2]),
    ],
    "two, FSDP1": [
        *covering([Case((COMPILED, option)) for option in SEEN]),
        *covering([Case((UNCOMPILED, option)) for option in OF_FSDP1 if option not in SEEN]),
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
QUICK_RANKS = {"two", "two, FSDP1"}
PARAMETERS = [
    pytest.param(ranks, case, id=f"{ranks}: {case}", marks=[] if ranks in QUICK_RANKS else [pytest.mark.slow])
    for ranks, cases in CASES.items()
    for case in cases
]
FOUND: dict[str, dict[str, str]] = {}


def errors_on_rank(rank: int, checkpoint: Checkpoint, ranks: str) -> list[str]:
    fsdp1_takes_models_on_a_cpu()
    torch._dynamo.reset()
    counters.clear()
    engines = Engines(checkpoint)
    with graphs_as_they_are() if "FSDP1" in ranks else nullcontext():
        errors = errors_of(rank, CASES[ranks], lambda case: assert_exact(case, engines))
    frames = counters["frames"]
    assert frames["total"] == frames["ok"], f"torch ran some of {frames['total']} frames uncompiled"
    return errors


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "case"), PARAMETERS)
def test_several_processes_keep_the_numbers(ranks: str, case: Case, checkpoint: Checkpoint) -> None:
    if ranks not in FOUND:
        by_rank = on_ranks(4 if ranks == "four" else 2, errors_on_rank, checkpoint, ranks)
        FOUND[ranks] = by_case(CASES[ranks], by_rank)
    assert not FOUND[ranks][str(case)], FOUND[ranks][str(case)]
