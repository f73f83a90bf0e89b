"""Every option alone, and every two that meet in the code, on one GPU in bf16."""

import pytest
import torch

from tests.engine.ranks import on_ranks
from tests.options.gpu import assert_as_close_as_stock, make_engines, needs_own_process, parameters, save_checkpoint
from tests.options.harness import Checkpoint, Engines
from tests.options.option import Case, alone, pairs
from tests.options.table import DEFAULT, OPTIONS, case_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("process_group"),
]

ON_ONE_GPU = [option for option in OPTIONS if option.num_ranks == 1]
(FSDP1,) = case_of("FSDP1").options
PAIRS = pairs(ON_ONE_GPU)
QUICK = [*alone(ON_ONE_GPU), *(pair for pair in PAIRS if FSDP1 in pair.options)]
"""Every option under FSDP2, and under FSDP1."""
IN_OWN_PROCESS = [case for case in QUICK if needs_own_process(case)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save_checkpoint(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def engines(checkpoint: Checkpoint) -> Engines:
    return make_engines(checkpoint)


@pytest.mark.parametrize("case", parameters(QUICK))
def test_option_is_as_close_to_float32_as_stock_rmpad(case: Case, engines: Engines) -> None:
    assert_as_close_as_stock(case, engines)


@pytest.mark.slow
@pytest.mark.parametrize("case", parameters([pair for pair in PAIRS if FSDP1 not in pair.options]))
def test_two_options_are_as_close_to_float32_as_stock_rmpad(case: Case, engines: Engines) -> None:
    assert_as_close_as_stock(case, engines)


def run_in_own_process(rank: int, checkpoint: Checkpoint, case: Case) -> None:
    assert_as_close_as_stock(case, make_engines(checkpoint))


@pytest.mark.parametrize("case", IN_OWN_PROCESS, ids=str)
def test_kernels_of_others_are_as_close_to_float32_as_under_stock_rmpad(case: Case, checkpoint: Checkpoint) -> None:
    if case.settings("model").get("use_liger"):
        pytest.importorskip("liger_kernel")
    on_ranks(1, run_in_own_process, checkpoint, case, device="cuda")


def test_fp16_with_a_scaled_loss(checkpoint: Checkpoint) -> None:
    assert_as_close_as_stock(DEFAULT, make_engines(checkpoint, "fp16"))
