"""The matrix on GPUs in bf16: errors against float32, held against those of stock rmpad with the same options."""

from pathlib import Path
from typing import Any

import pytest
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.options.harness import Checkpoint, Engines, batch_of, of_rows, reference_of, rows_of, run_on_this_rank
from tests.options.option import Case, Option
from tests.options.table import case_of
from tests.precision import SMOOTH_LOSS, assert_no_worse, errors, pooled
from tests.support import group
from verl_pg_plugin.synthetic import Sample

SCALE = 10
"""Samples are as many times as long as those of the matrix."""
NUM_BATCHES = 8
"""Of one batch an error is up to 1.4 times that of another way to round, and 0.6 times it of the next."""
# An even vocabulary: verl offloads without waiting for the copy, and FSDP2 reads parameters that it has to pad at once.
SIZES = {
    "vocab_size": 98,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
}
SMOOTH = Option("a loss without thresholds", "", loss=SMOOTH_LOSS)
FLASH = {"override_config": {"attn_implementation": "flash_attention_2"}}


def save_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.save(folder, initializer_range=0.05, **SIZES)


def make_engines(checkpoint: Checkpoint, param_dtype: str = "bf16") -> Engines:
    mixed = {"param_dtype": param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return Engines(checkpoint, {"mixed_precision": mixed})


def needs_own_process(case: Case) -> bool:
    """Liger, and verl's fused kernels in the stock engine, replace classes of transformers for good."""
    model = case.settings("model")
    return bool(model.get("use_liger") or model.get("use_fused_kernels"))


def parameters(cases: list[Case]) -> list[Any]:
    """Cases as parameters of a test, without those that would spoil the next."""
    return [pytest.param(case, id=str(case)) for case in cases if not needs_own_process(case)]


def samples_of(seed: int) -> list[Sample]:
    seeds = range(10 * seed, 10 * seed + 4)
    shapes = ((200, [50, 90, 10, 70]), (30, [50, 30]), (330, [40]), (110, [60]))
    return [sample for shape, seed in zip(shapes, seeds, strict=True) for sample in group(*shape, seed)]


def assert_as_close_as_stock(case: Case, engines: Engines) -> None:
    """Every error of packed mode on this rank is at most 1.1 times that of stock rmpad with the same options."""
    case = Case((SMOOTH, *case.options))
    fused = case.settings("model").get("use_fused_kernels", False)
    # verl's fused forwards read the head's weight outside the head, where FSDP2 has not gathered it.
    stock_case = Case((*case.options, *case_of("FSDP1").options)) if fused else case
    batches = [batch_of(case, samples_of(seed), SCALE) for seed in range(NUM_BATCHES)]
    # The stock engine comes last: it may replace what the others need.
    references = [reference_of(case, engines.checkpoint, batch) for batch in batches]
    packed = engines.of(case, model=FLASH)
    references = [
        of_rows(whole, rows_of(case, packed, batch)) for whole, batch in zip(references, batches, strict=True)
    ]
    results = [run_on_this_rank(case, packed, batch) for batch in batches]
    stock = engines.of(stock_case, packed=False, model=FLASH, engine_cls=FSDPEngineWithLMHead)
    for batch in batches:
        tu.assign_non_tensor(batch, use_fused_kernels=fused)
    baselines = [run_on_this_rank(case, stock, batch) for batch in batches]
    assert_no_worse(pooled(list(map(errors, results, references))), pooled(list(map(errors, baselines, references))))
