"""Options over two GPUs in bf16: FSDP2 and FSDP1, and Ulysses sequence parallelism with every option it meets.

One spawn runs all cases, as on processes without a GPU.
"""

import logging
import traceback

import pytest
import torch

from tests.engine.ranks import on_ranks
from tests.options.gpu import assert_as_close_as_stock, make_engines, needs_own_process, parameters, save_checkpoint
from tests.options.harness import Checkpoint
from tests.options.option import Case, alone, pairs
from tests.options.table import OPTIONS

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

UP_TO_TWO = [option for option in OPTIONS if option.num_ranks <= 2 and not option.slow]
MEETING = [*alone(UP_TO_TWO), *(case for case in pairs(UP_TO_TWO) if case.num_ranks == 2)]
CASES = [case for case in MEETING if not needs_own_process(case)]


def errors_on_rank(rank: int, checkpoint: Checkpoint) -> list[str]:
    """What is wrong with each case on this rank, empty where nothing is."""
    engines, errors = make_engines(checkpoint), []
    for case in CASES:
        logger.warning("rank %d: %s", rank, case)  # the last one is to blame where a process is killed
        try:
            assert_as_close_as_stock(case, engines)
            errors.append("")
        except Exception:
            errors.append(f"rank {rank}: {traceback.format_exc()}")
    return errors


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("gpu"))
    by_rank = on_ranks(2, errors_on_rank, checkpoint, device="cuda")
    return {str(case): "\n".join(filter(None, errors)) for case, *errors in zip(CASES, *by_rank, strict=True)}


@pytest.mark.parametrize("case", parameters(CASES))
def test_option_is_as_close_to_float32_as_stock_rmpad(case: Case, found: dict[str, str]) -> None:
    assert not found[str(case)], found[str(case)]
