"""flash-attn 2 as a ``VarlenAttention``; imported only where flash-attn is installed."""

from typing import Any

import flash_attn  # noqa: F401 - it registers its operators
import torch

from verl_pg_plugin.attention.kernels.flash_passes import FlashAttention, Scores, Tensors, as_operator
from verl_pg_plugin.attention.kernels.inputs import deterministic_backward
from verl_pg_plugin.attention.key_copies import Bounds

_varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward
_varlen_backward = torch.ops.flash_attn._flash_attn_varlen_backward


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 and bfloat16; head dims that are multiples of 8 up to 256, as far as the build holds them."""
    out, lse, *_ = _varlen_forward(q, k, v, **_keywords(bounds, scores, causal=True))
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
    keywords = {**_keywords(bounds, scores, causal), "alibi_slopes": None, "deterministic": deterministic_backward()}
    _varlen_backward(grad_out, q, k, v, out, lse, *gradients, **keywords)


def _keywords(bounds: Bounds, scores: Scores, causal: bool) -> dict[str, Any]:
    window = scores.window_size
    return {
        "cu_seqlens_q": bounds.cu_seqlens_q,
        "cu_seqlens_k": bounds.cu_seqlens_k,
        "max_seqlen_q": bounds.max_seqlen_q,
        "max_seqlen_k": bounds.max_seqlen_k,
        "dropout_p": 0.0,
        "softmax_scale": scores.softmax_scale,
        "causal": causal,
        "window_size_left": window,
        "window_size_right": 0 if window >= 0 else -1,
        "softcap": scores.softcap,
    }


attend = FlashAttention(as_operator("flash_attn_2", forward), backward)
