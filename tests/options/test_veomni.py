"""verl's VeOmni engine on two processes is exact with every option and every model type that it supports.

VeOmni needs two processes to shard, and keeps the parallel sizes of a process's first engine until they are cleared.
It writes to stdout when verl imports it, so only these processes have it on their path.
"""

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.architectures.tiny_configs import save_causal
from tests.engine.ranks import on_ranks, uncompiled_graphs
from tests.options.harness import Checkpoint, Engines, assert_exact, errors_of
from tests.options.option import Case, Option
from tests.options.table import case_of
from tests.support import make_engine
from verl_pg_plugin.config.rules import VEOMNI_TYPES

INSTALLED = Path(sys.prefix, "veomni")  # by scripts/install.sh
pytestmark = pytest.mark.skipif(
    not (INSTALLED.is_dir() or find_spec("veomni")), reason="needs the package veomni, see scripts/install.sh"
)

ON = Option("VeOmni", "", engine={"strategy": "veomni"})
REPLICATED = Option("weights whole on each rank", "", engine={"fsdp_size": 1})
ULYSSES = Option("Ulysses", "", engine={"ulysses_parallel_size": 2}, num_ranks=2)
SPLIT = case_of("a group larger than the token budget").options
TOGETHER = [
    case_of("dynamic batch size", "chunked entropy", "sum of squared probabilities", "temperature of the run").options,
    case_of("fixed micro-batch size", "log-probs without entropy", "temperature of each sample").options,
    (*SPLIT, *case_of("verify mode", "pad_to_length", "head in chunks", "entropy checkpointing").options),
    case_of("fused kernels, torch", "no gradient checkpointing").options,
    case_of("compiled layers", "activation offload").options,
    (*SPLIT, *case_of("attention recomputed in the backward", "parameter offload", "optimizer offload").options),
    (*SPLIT, REPLICATED),
    (ULYSSES, *case_of("pad_to_length", "compiled layers", "head in chunks").options),
]
CASES = [
    *(("qwen3", Case((ON, *options))) for options in TOGETHER),
    *((model_type, Case((ON, *SPLIT, *more))) for model_type in VEOMNI_TYPES for more in ((), (ULYSSES,))),
]
CASES.sort(key=lambda case: case[1].num_ranks)
IDS = [f"{model_type}, {case}" for model_type, case in CASES]


def errors_on_rank(rank: int, checkpoints: dict[str, Checkpoint]) -> list[str]:
    from veomni.distributed.parallel_state import clear_parallel_state

    engines: dict[tuple[str, int], Engines] = {}
    errors: list[str] = []
    for model_type, case in CASES:
        if (of := (model_type, case.num_ranks)) not in engines:
            clear_parallel_state()
            engines[of] = Engines(checkpoints[model_type])
        with uncompiled_graphs():
            errors += errors_of(rank, [case], partial(assert_exact, engines=engines[of]))
    with pytest.raises(ValueError, match="keeps that of a process's first engine, 2"):
        make_engine(checkpoints["qwen3"].model, strategy="veomni")
    return errors


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Traceback of each case on each rank, or ''."""
    folder = tmp_path_factory.mktemp("veomni")
    checkpoints = {kind: Checkpoint(save_causal(folder / kind, kind), "") for kind in VEOMNI_TYPES}
    by_rank = on_ranks(2, errors_on_rank, checkpoints, folder=INSTALLED)
    return dict(zip(IDS, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", IDS)
def test_veomni_is_exact(errors: dict[str, list[str]], case: str) -> None:
    assert not any(errors[case]), "\n".join(errors[case])
