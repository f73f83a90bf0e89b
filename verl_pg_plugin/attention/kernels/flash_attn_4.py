"""flash-attn 4 (PyPI ``flash-attn-4``) as a ``VarlenAttention``; imported only where it is installed.

Its kernels are compiled when first called, once for each combination of head dim, heads, mask and dtype, which takes
minutes; FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps them on disk.

flash-attn 4 is no operator of torch, so gradient checkpointing could not tell its output from the rest of a layer and
keep it (``engine.saved_attention``); here its forward and backward become one.
"""

import inspect
from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

from verl_pg_plugin.attention.kernels.inputs import cast_under_autocast, deterministic_backward

# flash-attn 2.8 ships an early copy in the same folder, which has no such argument.
if "max_seqlen_k" not in inspect.signature(_flash_attn_fwd).parameters:
    raise ImportError(
        "flash_attn/cute holds the copy that flash-attn 2 brings along; "
        "pip install --force-reinstall --no-deps --pre flash-attn-4"
    )


def attend(
    q_THD: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    window_size: int = -1,
    softcap: float = 0.0,
) -> torch.Tensor:
    """float16 and bfloat16; head dims that are multiples of 8, up to 256 on Hopper, up to 128 and 256 on Blackwell."""
    q_THD, k_KGD, v_KGD = cast_under_autocast(q_THD, k_KGD, v_KGD)
    out_THD, _ = _forward(
        q_THD,
        k_KGD,
        v_KGD,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size,
        softcap,
    )
    return out_THD


@torch.library.custom_op("verl_pg_plugin::flash_attn_4_forward", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_size: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=True,
        softcap=softcap,
        return_lse=True,
        **_window(window_size),
    )
    return out, lse


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.max_seqlen_q, ctx.max_seqlen_k, ctx.softmax_scale, ctx.window_size, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors  # nobody reads lse, so it has no gradient
    grads = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad_out,
        lse,
        ctx.softmax_scale,
        True,
        ctx.softcap,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=ctx.max_seqlen_q,
        max_seqlen_k=ctx.max_seqlen_k,
        deterministic=deterministic_backward(),
        **_window(ctx.window_size),
    )
    return (*grads[:3], *[None] * 7)


_forward.register_autograd(_backward, setup_context=_keep)


def _window(window_size: int) -> dict[str, int | None]:
    bounded = window_size >= 0
    return {"window_size_left": window_size if bounded else None, "window_size_right": 0 if bounded else None}
