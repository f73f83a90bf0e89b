"""flash-attn 3 is called as it documents itself; a stand-in with its signature computes what a CPU can.

The kernel itself runs in the GPU tests of kernels, where a build of it is installed.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from verl_pg_plugin.attention.kernels import sdpa
from verl_pg_plugin.attention.kernels import KERNELS
from verl_pg_plugin.engine.saved_attention import SavedAttention

MODULE = KERNELS["flash_attn_3"].module
CALLS: list[dict[str, Any]] = []
"""Arguments of every call of the stand-in."""
RUNS: list[int] = []
"""One entry for each run of its operator."""


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds_q: list[int], bounds_k: list[int], scale: float, left: int
) -> torch.Tensor:
    """Under the name of the operator; upstream's takes more."""
    RUNS.append(len(q))
    bounds = (torch.tensor(bounds_q), torch.tensor(bounds_k))
    return sdpa.attend(q, k, v, *bounds, 0, 0, softmax_scale=scale, window_size=left).clone()


class StandIn(torch.autograd.Function):
    """As upstream's: the operator inside of an autograd function."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> torch.Tensor:
        ctx.options = options
        ctx.save_for_backward(q, k, v)
        return run_forward(q, k, v, *options)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        bounds_q, bounds_k, scale, left = ctx.options
        bounds = (torch.tensor(bounds_q), torch.tensor(bounds_k))
        with torch.enable_grad():
            tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            out = sdpa.attend(*tensors, *bounds, 0, 0, softmax_scale=scale, window_size=left)
        return (*torch.autograd.grad(out, tensors, grad_out), None, None, None, None)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """The parameters of upstream's function, in its order (commit 01afd16)."""
    CALLS.append(dict(locals()))
    assert causal
    assert window_size[1] == (0 if window_size[0] >= 0 else -1), "a causal window ends at the query"
    return StandIn.apply(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), softmax_scale, window_size[0])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stand_in: Any = ModuleType("flash_attn_interface")
    stand_in.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    CALLS.clear()
    RUNS.clear()
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def inputs() -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[int, int]]:
    """Two segments, of 3 queries to 5 keys and of 2 to 2; four query heads to two key/value heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 4, 8), (7, 2, 8), (7, 2, 8))
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    return tensors, [torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 5, 7], dtype=torch.int32)], (3, 5)


@pytest.mark.parametrize("window", [-1, 0, 2])
def test_segments_are_causal_from_their_last_key_on_and_windows_count_as_ours(kernel: Any, window: int) -> None:
    tensors, bounds, longest = inputs()
    options = {"softmax_scale": 0.3, "window_size": window}
    got, want = (attend(*tensors, *bounds, *longest, **options) for attend in (kernel.attend, sdpa.attend))
    torch.testing.assert_close(got, want)
    for mine, theirs in zip(*(torch.autograd.grad(out.square().sum(), tensors) for out in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_lengths_caps_and_determinism_arrive_where_upstream_reads_them(kernel: Any, monkeypatch) -> None:
    tensors, bounds, longest = inputs()
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    kernel.attend(*tensors, *bounds, *longest, softmax_scale=0.3, softcap=30.0)
    (call,) = CALLS
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == longest
    assert (call["softcap"], call["deterministic"], call["softmax_scale"]) == (30.0, True, 0.3)
    defaults = inspect.signature(flash_attn_varlen_func).parameters
    for name in ("seqused_q", "qv", "attention_chunk", "num_splits", "pack_gqa", "sm_margin", "return_attn_probs"):
        assert call[name] == defaults[name].default


def test_builds_that_return_the_log_sum_exp_too_give_the_same_output(kernel: Any, monkeypatch) -> None:
    """As of before upstream's ``return_attn_probs``; ``auto`` takes them, since nothing else tells them apart."""
    tensors, bounds, longest = inputs()
    want = kernel.attend(*tensors, *bounds, *longest, softmax_scale=0.3)

    def earlier(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_attn_varlen_func(*args, **kwargs), torch.zeros(4, 5)

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_varlen_func", earlier)
    torch.testing.assert_close(kernel.attend(*tensors, *bounds, *longest, softmax_scale=0.3), want, rtol=0, atol=0)


def test_checkpointed_layers_keep_its_output(kernel: Any) -> None:
    """Under the operator's name that the spec lists; else every backward would run attention again."""
    tensors, bounds, longest = inputs()
    saved = SavedAttention("flash_attn_3")

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return kernel.attend(*tensors, *bounds, *longest, softmax_scale=0.3)

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        return saved.kernel(attend, *[tensor.sin() for tensor in tensors]).sin()

    checkpoint(layer, *tensors, use_reentrant=False, context_fn=saved.contexts).sum().backward()
    assert RUNS == [5]
    checkpoint(layer, *tensors, use_reentrant=False).sum().backward()
    assert RUNS == [5, 5, 5], "a checkpoint that keeps nothing runs it twice"


def test_a_build_without_its_operators_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace())
    names = "flash_attn_3::_flash_attn_forward or flash_attn_3::fwd"
    with pytest.raises(RuntimeError, match=f"no operator {names} in this version.*recompute_attention=True"):
        SavedAttention("flash_attn_3")
