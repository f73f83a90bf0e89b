"""The matrix on GPUs in bf16: errors against float32, held against those of stock rmpad with the same options."""

from pathlib import Path
from typing import Any

import pytest
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.options.harness import Checkpoint, Engines, batch_of, of_rows, reference_of, rows_of, run_on_this_rank
from tests.options.option import Case
from tests.precision import assert_no_worse, errors
from tests.support import group

SCALE = 10
SAMPLES = [*group(200, [50, 90, 10, 70], 1), *group(30, [50, 30], 2), *group(330, [40], 3), *group(110, [60], 9)]
"""Ten times as long as those of the matrix."""
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 3}
FLASH = {"override_config": {"attn_implementation": "flash_attention_2"}}


def save_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.save(folder, initializer_range=0.05, **SIZES)


def make_engines(checkpoint: Checkpoint, param_dtype: str = "bf16") -> Engines:
    mixed = {"param_dtype": param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return Engines(checkpoint, {"mixed_precision": mixed})


def uses_liger(case: Case) -> bool:
    """Liger replaces transformers' classes for good, so such a case needs a process of its own."""
    return bool(case.settings("model").get("use_liger"))


def parameters(cases: list[Case]) -> list[Any]:
    """Cases as parameters of a test."""
    return [pytest.param(case, id=str(case)) for case in cases if not uses_liger(case)]


def without_fused_kernels(case: Case) -> Case:
    """verl's own fused kernels replace the forward of the model's class, in this process for good."""
    return Case(tuple(option for option in case.options if not option.model.get("use_fused_kernels")))


def assert_as_close_as_stock(case: Case, engines: Engines) -> None:
    """Every error of packed mode on this rank is at most 1.1 times that of stock rmpad."""
    batch = batch_of(case, SAMPLES, SCALE)
    whole = reference_of(case, engines.checkpoint, batch)  # first: Liger replaces classes that it needs
    packed = engines.of(case, model=FLASH)
    reference = of_rows(whole, rows_of(packed, batch))
    plain = without_fused_kernels(case)
    stock = engines.of(plain, packed=False, model=FLASH, engine_cls=FSDPEngineWithLMHead)
    baseline = errors(run_on_this_rank(plain, stock, batch_of(plain, SAMPLES, SCALE)), reference)
    assert_no_worse(errors(run_on_this_rank(case, packed, batch), reference), baseline)
