"""Options in bf16 on one GPU and on two: errors against float32, compared with stock rmpad's with the same options.

Every option alone, and every two of the same code. Most of a case runs on the host, so processes share GPUs.
"""

import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from benchmarks.batches import Sample
from verl.utils import tensordict_utils as tu

from tests.engine.ranks import on_ranks
from tests.options.harness import Checkpoint, Engines, batch_of, by_case, errors_of, run_on_this_rank, samples_of_rank
from tests.options.option import Case, Option, alone, pairs
from tests.options.table import DEFAULT, OPTIONS, case_of
from tests.precision import BF16, FLASH, GPU_SIZES, PRECISIONS, SMOOTH_LOSS, assert_no_worse, errors, pooled
from tests.support import group

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("process_group")]

SCALE = 10  # length of samples relative to those of the matrix
NUM_BATCHES = 8
"""Ratios of errors on single batches vary from 0.6 to 1.4."""
SMOOTH = Option("a loss without thresholds", "", loss=SMOOTH_LOSS)
AT_ONCE = 6


def kernels_of_others(case: Case) -> str:
    """Name the kernels that replace classes of transformers in the process: Liger, or verl's fused kernels."""
    model = case.settings("model")
    return "liger" if model.get("use_liger") else "fused" if model.get("use_fused_kernels") else ""


ON_ONE_GPU = [option for option in OPTIONS if option.num_ranks == 1]
(FSDP1,) = case_of("FSDP1").options
QUICK = [*alone(ON_ONE_GPU), *(pair for pair in pairs(ON_ONE_GPU) if FSDP1 in pair.options)]
"""Every option under FSDP2, and under FSDP1."""
SLOW = [
    pytest.param(pair, marks=pytest.mark.slow)
    for pair in pairs(ON_ONE_GPU)
    if FSDP1 not in pair.options and not kernels_of_others(pair)
]
UP_TO_TWO = [option for option in OPTIONS if option.num_ranks <= 2 and not option.compiles]
ON_TWO_GPUS = [
    case
    for case in [*alone(UP_TO_TWO), *(pair for pair in pairs(UP_TO_TWO) if pair.num_ranks == 2)]
    if not kernels_of_others(case)
]


def samples_of(seed: int) -> list[Sample]:
    shapes = ((200, [50, 90, 10, 70]), (30, [50, 30]), (330, [40]), (110, [60]))
    return [sample for at, shape in enumerate(shapes) for sample in group(*shape, 10 * seed + at)]


def compare(case: Case, engines: Engines) -> Iterator[None]:
    """Every error of packed mode on this rank is at most 1.1 times that of stock rmpad with the same options.

    A generator of three steps, float32, packed mode and stock verl: a later one may replace classes of an earlier one.
    """
    case = Case((SMOOTH, *case.options))
    fused = case.settings("model").get("use_fused_kernels", False)
    # verl's fused forwards read the head's weight outside the head, where FSDP2 keeps it sharded.
    stock_case = Case((*case.options, FSDP1)) if fused else case
    batches = [batch_of(case, samples_of(seed), SCALE) for seed in range(NUM_BATCHES)]
    whole = [engines.reference_of(case, batch, seed) for seed, batch in enumerate(batches)]
    yield
    packed = engines.of(case, model=FLASH)
    references = [of_all.of_rank(samples_of_rank(case, packed, b)) for of_all, b in zip(whole, batches, strict=True)]
    results = [run_on_this_rank(case, packed, batch) for batch in batches]
    yield
    stock = engines.of(stock_case, packed=False, model=FLASH)
    for batch in batches:
        tu.assign_non_tensor(batch, use_fused_kernels=fused)
    baselines = [run_on_this_rank(case, stock, batch) for batch in batches]
    assert_no_worse(pooled(list(map(errors, results, references))), pooled(list(map(errors, baselines, references))))


def assert_as_close_as_stock(case: Case, engines: Engines) -> None:
    for _ in compare(case, engines):
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.save(tmp_path_factory.mktemp("gpu"), **GPU_SIZES)


@pytest.fixture(scope="module")
def engines(checkpoint: Checkpoint) -> Engines:
    return Engines(checkpoint, BF16)


@pytest.mark.parametrize("case", [*(case for case in QUICK if not kernels_of_others(case)), *SLOW], ids=str)
def test_options_are_as_close_to_float32_as_stock_rmpad(case: Case, engines: Engines) -> None:
    assert_as_close_as_stock(case, engines)


def errors_step_by_step(cases: list[Case], engines: Engines) -> Iterator[tuple[str, str]]:
    """Yield each case with its traceback, or ''; all cases finish a step before any starts the next."""
    steps = {case: compare(case, engines) for case in cases}
    while steps:
        for case, step in list(steps.items()):
            try:
                next(step)
            except Exception as ended:  # StopIteration is one
                del steps[case]
                yield str(case), "" if isinstance(ended, StopIteration) else traceback.format_exc()


def errors_with_kernels_of_others(rank: int, checkpoint: Checkpoint, kernels: str) -> dict[str, str]:
    # Engines of one backend are adjacent in this order: the backend of the last one built is active.
    cases = sorted((case for case in QUICK if kernels_of_others(case) == kernels), key=str)
    return dict(errors_step_by_step(cases, Engines(checkpoint, BF16)))


ERRORS: dict[str, dict[str, str]] = {}


@pytest.mark.timeout(460)
@pytest.mark.parametrize("case", [case for case in QUICK if kernels_of_others(case)], ids=str)
def test_kernels_of_others_are_as_close_to_float32_as_under_stock_rmpad(case: Case, checkpoint: Checkpoint) -> None:
    """Cases with the same kernels share a process."""
    if (kernels := kernels_of_others(case)) == "liger":
        pytest.importorskip("liger_kernel")
    if kernels not in ERRORS:
        ERRORS[kernels] = {}  # if the process dies, later cases do not start it again
        (ERRORS[kernels],) = on_ranks(1, errors_with_kernels_of_others, checkpoint, kernels, device="cuda")
    error = ERRORS[kernels].get(str(case), "its process died or was too slow")
    assert not error, error


def test_fp16_with_a_scaled_loss(checkpoint: Checkpoint) -> None:
    assert_as_close_as_stock(DEFAULT, Engines(checkpoint, PRECISIONS["fp16"]))


def errors_on_rank(rank: int, checkpoint: Checkpoint, cases: list[Case]) -> list[str]:
    return errors_of(rank, cases, partial(assert_as_close_as_stock, engines=Engines(checkpoint, BF16)))


def errors_of_shard(checkpoint: Checkpoint, cases: list[Case]) -> dict[str, str]:
    """Errors from two new processes; if one dies, all of its cases fail."""
    try:
        return by_case(cases, on_ranks(2, errors_on_rank, checkpoint, cases, device="cuda"))
    except Exception:
        return {str(case): traceback.format_exc() for case in cases}


@pytest.fixture(scope="module")
def on_two_gpus(checkpoint: Checkpoint) -> dict[str, str]:
    shards = [ON_TWO_GPUS[first::AT_ONCE] for first in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        errors = pool.map(errors_of_shard, [checkpoint] * AT_ONCE, shards)
        return {case: error for shard in errors for case, error in shard.items()}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("case", ON_TWO_GPUS, ids=str)
def test_option_on_two_gpus_is_as_close_to_float32_as_stock_rmpad(case: Case, on_two_gpus: dict[str, str]) -> None:
    assert not on_two_gpus[str(case)], on_two_gpus[str(case)]
