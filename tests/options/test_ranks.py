"""Options over several processes: FSDP2 and FSDP1, Ulysses sequence parallelism, hybrid sharding, compiled layers.

All cases of a number of ranks share its processes: a process takes longer to start than a case to run.
"""

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from benchmarks.batches import make_batch
from torch._dynamo.utils import counters

from tests.architectures.tiny_configs import save_causal
from tests.engine.ranks import check_exact_on_ranks, on_ranks, uncompiled_graphs
from tests.engine.test_compiled_layers import RAGGED, assert_compiled_once, forget_graphs
from tests.options.harness import Checkpoint, Engines, assert_exact, by_case, errors_of
from tests.options.option import Case, Option, Place, alone, covering, pairs
from tests.options.table import BUDGET, OPTIONS, SAMPLES, case_of
from tests.support import check_outputs, critic_batch, make_engine, update

ON_CPU = [option for option in OPTIONS if not option.needs_gpu]
QUICK = [option for option in ON_CPU if not option.compiles]


def up_to(num_ranks: int, options: list[Option]) -> list[Option]:
    return [option for option in options if option.num_ranks <= num_ranks]


COMPILED = Option("compiled layers of FSDP1", "", engine={"strategy": "fsdp", "compile_layers": True})
UNCOMPILED = Option("layers of FSDP1", "", engine={"strategy": "fsdp"})
# The first is for FSDP2 only, the second for GPUs only: verl loads FSDP1's weights to a device number.
NOT_FSDP1 = {"FSDP2 offload policy", "parameter offload"}
OF_FSDP1 = [option for option in up_to(2, QUICK) if not (option.is_default or option.name in NOT_FSDP1)]
# Options that change compiled layers; adapters are refused.
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
    # With options that change the weights or the tokens of a rank.
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
ERRORS: dict[str, dict[str, str]] = {}

PARTS = [list(range(rank, len(SAMPLES), 2)) for rank in range(2)]
COMPILED_FSDP1 = {"strategy": "fsdp", "engine": {"compile_layers": True}}


def check_reference_policy(rank: int, path: str) -> None:
    options = {"forward_only": True, "model_dtype": "fp32", "compile_layers": True}
    engine = make_engine(path, strategy="fsdp", engine=options)
    # Its offloaded shards would be pinned, which needs a GPU.
    with patch.object(torch.Tensor, "pin_memory", lambda self: self):
        check_outputs(engine, path, make_batch([SAMPLES[i] for i in PARTS[rank]]))


def errors_on_rank(rank: int, checkpoint: Checkpoint, ranks: str) -> list[str]:
    engines = Engines(checkpoint)
    if "FSDP1" not in ranks:
        return errors_of(rank, CASES[ranks], lambda case: assert_exact(case, engines))
    forget_graphs()
    with uncompiled_graphs():
        engine = engines.of(Case((COMPILED,)))
        assert_compiled_once(update(engine, make_batch(samples, max_token_len_per_gpu=64)) for samples in RAGGED)
        errors = errors_of(rank, CASES[ranks], lambda case: assert_exact(case, engines))
        check_reference_policy(rank, checkpoint.model)
    frames = counters["frames"]
    assert frames["total"] == frames["ok"], f"torch ran some of {frames['total']} frames uncompiled"
    return errors


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "case"), PARAMETERS)
def test_options_on_several_ranks_are_exact(ranks: str, case: Case, checkpoint: Checkpoint) -> None:
    if ranks not in ERRORS:
        by_rank = on_ranks(4 if ranks == "four" else 2, errors_on_rank, checkpoint, ranks)
        ERRORS[ranks] = by_case(CASES[ranks], by_rank)
    assert not ERRORS[ranks][str(case)], ERRORS[ranks][str(case)]


def test_compiled_critics_under_fsdp1_are_exact(value_model: str) -> None:
    make = partial(critic_batch, SAMPLES, max_token_len_per_gpu=BUDGET)
    check_exact_on_ranks(value_model, make, PARTS, critic=True, **COMPILED_FSDP1)


@pytest.mark.slow
def test_compiled_experts_under_fsdp1_are_exact(tmp_path: Path) -> None:
    path = save_causal(tmp_path, "qwen3_moe")
    # torch compiles this implementation without graph breaks on a CPU.
    override = {"attn_implementation": "sdpa", "_experts_implementation": "batched_mm"}
    make = partial(make_batch, SAMPLES, max_token_len_per_gpu=BUDGET)
    check_exact_on_ranks(path, make, PARTS, model={"override_config": override}, **COMPILED_FSDP1)
