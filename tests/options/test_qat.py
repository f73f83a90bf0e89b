"""Shared prefixes with quantization-aware training (W4A16)."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import transformers
from benchmarks.batches import make_batch
from verl.utils.qat.core import apply_qat, enable_qat_fuse
from verl.workers.config import QATEngineConfig

from tests.engine.carried_cases import CASES
from tests.options.harness import batch_of, loss_of, run_on_this_rank
from tests.options.option import Case
from tests.options.test_gpu import NUM_BATCHES, SCALE, SMOOTH, samples_of
from tests.precision import BF16, FLASH, GPU_SIZES, assert_no_worse, errors, pooled
from tests.support import check_exact, make_engine, run_reference, save_tiny_model

pytestmark = pytest.mark.usefixtures("process_group")

W4A16 = QATEngineConfig(enable=True, mode="w4a16")
STEPS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def round_weight(weight: torch.Tensor, global_amax: torch.Tensor, block_size: int = 16) -> torch.Tensor:
    """Round as verl's Triton kernel: FP4 values, ties to even, in blocks with an FP8 scale."""
    blocks, scale = weight.float().reshape(-1, block_size), global_amax.float() / (6 * 448)
    of_block = (blocks.abs().amax(-1, keepdim=True) / (6 * scale)).clamp(max=448).to(torch.float8_e4m3fn)
    of_block = of_block.float() * scale
    of_block = torch.where(of_block >= 1e-5, of_block, 1.0)
    x = blocks.abs() / of_block
    step = 0 + (x > 0.25) + (x >= 0.75) + (x > 1.25) + (x >= 1.75) + (x > 2.5) + (x >= 3.5) + (x > 5)
    return (STEPS.to(x.device)[step] * of_block * blocks.sign()).reshape(weight.shape).to(weight.dtype)


@pytest.fixture(scope="module")
def kernel() -> Any:
    """verl's module, with ``round_weight`` in place of its kernel on a CPU."""
    names = [] if find_spec("triton") else ["triton", "triton.language"]
    with patch.dict(sys.modules, {name: MagicMock() for name in names}):
        from verl.utils.qat import linear
    sys.modules[linear.__name__] = linear
    stock = linear.fp4_fake_quant_weight

    def round_anywhere(weight: torch.Tensor, global_amax: torch.Tensor, block_size: int) -> torch.Tensor:
        return (stock if weight.is_cuda else round_weight)(weight, global_amax, block_size)

    with patch.object(linear, "fp4_fake_quant_weight", round_anywhere):
        yield linear


@contextmanager
def quantized_references() -> Iterator[None]:
    load = transformers.AutoModelForCausalLM.from_pretrained

    def load_quantized(*args: Any, **options: Any) -> Any:
        model = apply_qat(load(*args, **options), {"enable": True, "mode": W4A16.mode})
        enable_qat_fuse(model)
        return model

    with patch.object(transformers.AutoModelForCausalLM, "from_pretrained", load_quantized):
        yield


def quantized_engine(kernel: Any, path: str, packed: bool = True, **settings: Any) -> Any:
    """Build an engine with rounded weights; packed ones split groups."""
    settings["engine"] = {**settings.get("engine", {}), "compile_layers": False, "qat": W4A16}
    engine = make_engine(path, packed=packed, splits=packed, **settings)
    rounded = sum(isinstance(module, kernel.QATLinear) for module in engine.module.modules())
    assert rounded == 7 * engine.module.config.num_hidden_layers
    return engine


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's division differs from torch's")
def test_rounded_weights_match_single_sequences(tmp_path: Path, kernel: Any) -> None:
    path, (samples, budget) = save_tiny_model(tmp_path), CASES["small_groups_next_to_large_ones"]
    engine, batch = quantized_engine(kernel, path), make_batch(samples, max_token_len_per_gpu=budget)
    with quantized_references():
        rounded = check_exact(engine, path, batch, splits=True).outputs["log_probs"]
    plain = run_reference(path, batch).outputs["log_probs"]
    assert max((a - b).abs().max() for a, b in zip(plain, rounded, strict=True)) > 0.1


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_errors_are_those_of_stock_rmpad_with_the_same_weights(tmp_path: Path, kernel: Any) -> None:
    """The checkpoint is in bfloat16, so that engines and reference round the same weights."""
    weight = torch.randn(256, 512).bfloat16()
    rounded = kernel.fp4_fake_quant_weight(weight.cuda(), weight.abs().max().cuda(), 16).cpu()
    assert (rounded != round_weight(weight, weight.abs().max())).float().mean() < 0.01

    path = save_tiny_model(tmp_path, **GPU_SIZES)
    transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float().save_pretrained(path)
    case = Case((SMOOTH,))
    batches = [batch_of(case, samples_of(seed), SCALE) for seed in range(NUM_BATCHES)]
    with quantized_references():
        references = [run_reference(path, batch, loss_of(case)) for batch in batches]

    def errors_of(packed: bool) -> dict[str, float]:
        engine = quantized_engine(kernel, path, packed=packed, engine=BF16, model=FLASH)
        return pooled([errors(run_on_this_rank(case, engine, b), r) for b, r in zip(batches, references, strict=True)])

    assert_no_worse(errors_of(packed=True), errors_of(packed=False))
