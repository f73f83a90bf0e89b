"""flash-attn 4 (PyPI ``flash-attn-4``) as a ``VarlenAttention``; imported only where it is installed.

Its kernels are compiled when first called, once for each combination of head dim, heads, mask and dtype, which takes
minutes; FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps them on disk.
"""

import inspect
from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

from verl_pg_plugin.attention.kernels.flash_passes import FlashAttention, Scores, Tensors, as_operator
from verl_pg_plugin.attention.kernels.inputs import deterministic_backward
from verl_pg_plugin.attention.key_copies import Bounds

# flash-attn 2.8 ships an early copy in the same folder, which has no such argument.
if "max_seqlen_k" not in inspect.signature(_flash_attn_fwd).parameters:
    raise ImportError(
        "flash_attn/cute holds the copy that flash-attn 2 brings along; "
        "pip install --force-reinstall --no-deps --pre flash-attn-4"
    )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 and bfloat16; head dims that are multiples of 8, up to 256 on Hopper, up to 128 and 256 on Blackwell."""
    out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **_keywords(bounds, scores, causal=True))
    return out, lse


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradients: Tensors,
    bounds: Bounds,
    scores: Scores,
    *,
    causal: bool,
) -> None:
    """See ``Backward``."""
    keywords = {**_keywords(bounds, scores, causal), "deterministic": deterministic_backward()}
    dq, dk, dv = gradients
    _flash_attn_bwd(q, k, v, out, grad_out, lse, dq=dq, dk=dk, dv=dv, **keywords)


def _keywords(bounds: Bounds, scores: Scores, causal: bool) -> dict[str, Any]:
    bounded = scores.window_size >= 0
    return {
        "cu_seqlens_q": bounds.cu_seqlens_q,
        "cu_seqlens_k": bounds.cu_seqlens_k,
        "max_seqlen_q": bounds.max_seqlen_q,
        "max_seqlen_k": bounds.max_seqlen_k,
        "softmax_scale": scores.softmax_scale,
        "causal": causal,
        "window_size_left": scores.window_size if bounded else None,
        "window_size_right": 0 if bounded else None,
        "softcap": scores.softcap,
    }


attend = FlashAttention(as_operator("flash_attn_4", forward), backward)
