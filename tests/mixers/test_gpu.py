"""Gated DeltaNet over packed tokens on a GPU, through fla's kernels; and Mamba2, which is refused there until this ran.

Stock rmpad leaks states between sequences, so the baseline is stock padded mode. The float32 reference runs on the CPU
through transformers' own fallback.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.batches import make_batch
from tensordict import TensorDict

from tests.layout.tries import sequence_rows
from tests.mixers.hybrids import save_hybrid, trie_of_depth
from tests.precision import BF16, FLASH, SMOOTH_LOSS, assert_no_worse, error_of
from tests.support import Result, actor_loss, group, make_engine, run_reference, splitting
from verl_pg_plugin.mixers import MIXERS, recurrence
from verl_pg_plugin.mixers.convolution import Windows, convolve, plain_convolution
from verl_pg_plugin.mixers.delta_layer import delta_rule_over
from verl_pg_plugin.mixers.gated_delta import kernel_obstacles
from verl_pg_plugin.mixers.layer_types import MAMBA2
from verl_pg_plugin.mixers.recurrence import Depths

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("process_group")]
OBSTACLES = kernel_obstacles("cuda")
with_fla = pytest.mark.skipif(bool(OBSTACLES), reason="; ".join(OBSTACLES))
HEADS = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 64)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05, **HEADS}
SAMPLES = [*group(300, [60, 33, 90, 5, 71, 64, 20, 48], 1), *group(150, [100, 40, 77, 90], 2), *group(90, [64], 3)]
BATCH = make_batch(SAMPLES, max_token_len_per_gpu=1200)
LOSS = actor_loss(**SMOOTH_LOSS)


@contextmanager
def without_fla() -> Iterator[None]:
    """Build models in the block that compute as on a CPU."""
    modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    names = ("chunk_gated_delta_rule", "causal_conv1d_fn", "FusedRMSNormGated")
    with patch.multiple(modeling, **dict.fromkeys(names)):
        yield


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    with without_fla():
        return save_hybrid(tmp_path_factory.mktemp("hybrid"), "qwen3_5_text", **SIZES)


def alone(path: str, batch: TensorDict) -> Result:
    with without_fla():
        return run_reference(path, batch, LOSS)


def on_gpu(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def recurrence_inputs(num_rows: int) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values, log decay and beta of 4 heads; the decay keeps what it reads for tens of rows."""
    q, k, v = (on_gpu(num_rows, 4, 64, seed=seed) for seed in range(3))
    decay = -0.05 * torch.rand(num_rows, 4, generator=torch.Generator().manual_seed(3)).to("cuda")
    beta = torch.rand(num_rows, 4, generator=torch.Generator().manual_seed(4)).to("cuda", torch.bfloat16)
    return tuple(x.requires_grad_() for x in (q, k, v, decay, beta))


def fla_rule() -> Any:
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


@with_fla
@pytest.mark.parametrize("depth", [2, 4])
def test_the_recurrence_over_a_trie_is_that_of_every_sequence_alone(depth: int) -> None:
    batch = trie_of_depth(depth)
    layout = batch.layout()
    inputs = recurrence_inputs(layout.num_tokens)
    out = delta_rule_over(Depths.from_layout(layout, "cuda"), fla_rule(), inputs, use_qk_l2norm_in_kernel=True)
    weight, readers = on_gpu(*out.shape, seed=9).float(), torch.zeros(layout.num_tokens, 1, 1, device="cuda")
    want = [torch.zeros_like(x, dtype=torch.float32) for x in inputs]
    for sequence in batch.sequences:
        rows = torch.tensor(sequence_rows(layout, sequence), device="cuda")
        readers[rows] += 1
        own = [x[rows].detach().requires_grad_() for x in inputs]
        q, k, v, g, beta = (x.unsqueeze(0) for x in own)
        alone = fla_rule()(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0].squeeze(0)
        assert (out[rows] - alone).float().norm() <= 2e-2 * alone.float().norm()
        for total, gradient in zip(want, torch.autograd.grad((alone * weight[rows]).sum(), own), strict=True):
            total.index_add_(0, rows, gradient.float())
    for got, expected in zip(torch.autograd.grad((out * weight * readers).sum(), inputs), want, strict=True):
        assert (got.float() - expected).norm() <= 2e-2 * expected.norm()


@with_fla
def test_the_recurrence_gives_the_same_bits_each_time() -> None:
    layout = trie_of_depth(4).layout()
    levels, inputs = Depths.from_layout(layout, "cuda"), recurrence_inputs(layout.num_tokens)

    def run() -> list[torch.Tensor]:
        out = delta_rule_over(levels, fla_rule(), inputs, use_qk_l2norm_in_kernel=True)
        return [out.detach(), *torch.autograd.grad((out.float() * on_gpu(*out.shape, seed=9).float()).sum(), inputs)]

    assert all(torch.equal(first, second) for first, second in zip(run(), run(), strict=True))


def test_states_handed_to_many_children_are_summed_in_order() -> None:
    counts = torch.tensor([3, 0, 200, 1], device="cuda")
    state = on_gpu(4, 2, 64, 64, seed=0, dtype=torch.float32).requires_grad_()
    grad = on_gpu(204, 2, 64, 64, seed=1, dtype=torch.float32)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(recurrence._RepeatState.apply(state, counts, 204), state, grad)[0]

    first = gradient()
    assert torch.equal(first, gradient())
    want = torch.stack([part.double().sum(0) for part in grad.split(counts.tolist())])
    assert (first.double() - want).abs().max() <= 1e-5 * want.abs().max()


@with_fla
def test_the_convolution_over_a_trie_is_that_on_the_cpu() -> None:
    layout, width = trie_of_depth(3).layout(), 256
    weight = torch.randn(width, 4, generator=torch.Generator().manual_seed(1))
    x = torch.randn(1, width, layout.num_tokens, generator=torch.Generator().manual_seed(0))
    out_weight, results = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)), []
    for device in ("cpu", "cuda"):
        own, w = (tensor.to(device).detach().requires_grad_() for tensor in (x, weight))
        windows = Windows.from_layout(layout, 4, torch.device(device))
        out = convolve(own, windows, lambda part, w=w: plain_convolution(part, w, activation="silu"))
        (out * out_weight.to(device)).sum().backward()
        results.append([tensor.detach().cpu() for tensor in (out, own.grad, w.grad)])
    for want, got in zip(*results, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@with_fla
def test_bf16_error_is_at_most_that_of_stock_padded_mode(hybrid: str) -> None:
    padded = make_batch(SAMPLES, use_remove_padding=False, use_dynamic_bsz=False, micro_batch_size_per_gpu=13)
    stock = make_engine(hybrid, packed=False, engine=BF16, model={**FLASH, "use_remove_padding": False})
    reference = alone(hybrid, BATCH)
    baseline = error_of(stock, padded, reference, LOSS)
    assert_no_worse(error_of(make_engine(hybrid, engine=BF16, model=FLASH), BATCH, reference, LOSS), baseline)


@with_fla
@pytest.mark.parametrize("options", [{"verify": "first"}, {"compile_layers": True}], ids=str)
def test_options_of_packed_mode_change_bf16_numbers_by_rounding_alone(hybrid: str, options: dict) -> None:
    engines = [make_engine(hybrid, engine={**BF16, **more}, model=FLASH) for more in ({}, options)]
    reference = alone(hybrid, BATCH)
    plain, changed = (error_of(engine, BATCH, reference, LOSS) for engine in engines)
    assert all(changed[name] <= 1.25 * plain[name] for name in changed)


@with_fla
def test_split_groups_change_bf16_numbers_by_rounding_alone(hybrid: str) -> None:
    samples = group(300, [60, 33, 90, 5, 71, 64, 20, 48] * 4, 1)
    reference = alone(hybrid, make_batch(samples))
    engine = make_engine(hybrid, splits=True, engine=BF16, model=FLASH)
    whole = error_of(engine, make_batch(samples), reference, LOSS)
    with splitting(engine):
        split = error_of(engine, make_batch(samples, max_token_len_per_gpu=900), reference, LOSS)
    assert all(split[name] <= 1.25 * whole[name] for name in split)


@with_fla
@pytest.mark.parametrize("kind", ["bamba", "granitemoehybrid"])
def test_mamba2_bf16_error_is_at_most_that_of_stock_padded_mode(kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(MIXERS, MAMBA2, replace(MIXERS[MAMBA2], machine_obstacles=lambda device_name: []))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05, "mamba_d_head": 64}
    path = save_hybrid(tmp_path, kind, **sizes)
    padded = make_batch(SAMPLES, use_remove_padding=False, use_dynamic_bsz=False, micro_batch_size_per_gpu=13)
    stock = make_engine(path, packed=False, engine=BF16, model={**FLASH, "use_remove_padding": False})
    reference = run_reference(path, BATCH, LOSS)
    baseline = error_of(stock, padded, reference, LOSS)
    assert_no_worse(error_of(make_engine(path, engine=BF16, model=FLASH), BATCH, reference, LOSS), baseline)
