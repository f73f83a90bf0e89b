"""Options over two GPUs in bf16: FSDP2 and FSDP1, and Ulysses sequence parallelism with every option it meets.

Most of a case is the host's work, so several pairs of processes share the two GPUs.
"""

import faulthandler
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.engine.ranks import on_ranks
from tests.options.gpu import assert_as_close_as_stock, make_engines, needs_own_process, parameters, save_checkpoint
from tests.options.harness import Checkpoint, by_case, errors_of
from tests.options.option import Case, alone, pairs
from tests.options.table import OPTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]

UP_TO_TWO = [option for option in OPTIONS if option.num_ranks <= 2 and not option.compiles]
MEETING = [*alone(UP_TO_TWO), *(case for case in pairs(UP_TO_TWO) if case.num_ranks == 2)]
CASES = [case for case in MEETING if not needs_own_process(case)]
AT_ONCE = 6


def errors_on_rank(rank: int, checkpoint: Checkpoint, cases: list[Case], log: Path) -> list[str]:
    """``log`` gets what the process says."""
    with log.with_suffix(f".{rank}").open("w") as said:
        os.dup2(said.fileno(), sys.stderr.fileno())  # what a process says that is aborted, from whatever language
    faulthandler.enable()
    engines = make_engines(checkpoint)

    def check(case: Case) -> None:
        os.write(sys.stderr.fileno(), f"begins: {case}\n".encode())
        assert_as_close_as_stock(case, engines)

    return errors_of(rank, cases, check)


def errors_of_shard(cases: list[Case], checkpoint: Checkpoint, log: Path) -> dict[str, str]:
    """Of two processes of their own; one that dies takes all of their cases."""
    try:
        return by_case(cases, on_ranks(2, errors_on_rank, checkpoint, cases, log, device="cuda"))
    except Exception:
        logs = sorted(log.parent.glob(f"{log.name}.*"))
        said = "\n".join(f"rank {path.suffix[1:]} said: {path.read_text()[-8000:]}" for path in logs)
        return {str(case): f"{traceback.format_exc()}\n{said}" for case in cases}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("gpu")
    checkpoint = save_checkpoint(folder)
    shards = [CASES[first::AT_ONCE] for first in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        logs = [folder / f"shard{number}" for number in range(AT_ONCE)]
        errors = pool.map(errors_of_shard, shards, [checkpoint] * AT_ONCE, logs)
        return {case: error for shard in errors for case, error in shard.items()}


@pytest.mark.parametrize("case", parameters(CASES))
def test_option_is_as_close_to_float32_as_stock_rmpad(case: Case, found: dict[str, str]) -> None:
    assert not found[str(case)], found[str(case)]
