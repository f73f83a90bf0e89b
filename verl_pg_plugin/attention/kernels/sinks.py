"""Learned attention sinks on a CPU: attention without them, corrected by each row's log-sum-exp.

A sink is one more score s of every query of a head, whose value is zero (gpt-oss). With o and l the output and the
log-sum-exp of attention without it, and l' = logaddexp(l, s), the output is o' = o * exp(l - l'). The backward of
attention reads its probabilities off the log-sum-exp and their mean gradient off the output, so it is exact with
(o', l') in place of (o, l); what is left is ds = -sum over queries of exp(s - l') * (do . o').
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["attend_with_sinks"]

_aten = torch.ops.aten


def attend_with_sinks(
    q_HLD: torch.Tensor,
    k_GMD: torch.Tensor,
    v_GMD: torch.Tensor,
    sinks_H: torch.Tensor,
    mask_LM: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    """Attention of one segment.

    Args:
        q_HLD: queries of H heads; k_GMD, v_GMD: keys and values of as many heads or a divisor of them.
        sinks_H: score of each head's sink, not scaled.
        mask_LM: bool, True where a query sees a key; every query sees one. None for a causal square.

    Returns:
        (H, L, D), dtype of ``q_HLD``.
    """
    repeats = len(q_HLD) // len(k_GMD)
    # Called by name the kernel is out of autocast's reach, which may have left one of them in another dtype.
    k_HMD, v_HMD = (x.to(q_HLD.dtype).repeat_interleave(repeats, dim=0) for x in (k_GMD, v_GMD))
    bias = None
    if mask_LM is not None:
        bias = torch.zeros(mask_LM.shape, dtype=q_HLD.dtype).masked_fill_(~mask_LM, -torch.inf)[None, None]
    return _Corrected.apply(q_HLD[None], k_HMD[None], v_HMD[None], sinks_H, bias, softmax_scale)[0]


class _Corrected(torch.autograd.Function):
    """The kernel behind torch's SDPA on a CPU, called by name since SDPA itself keeps the log-sum-exp for itself."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks_H: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        ctx.options = {"dropout_p": 0.0, "is_causal": bias is None, "attn_mask": bias, "scale": scale}
        out, lse_1HL = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **ctx.options)
        corrected_1HL = torch.logaddexp(lse_1HL, sinks_H[None, :, None].to(lse_1HL.dtype))
        out = (out * torch.exp(lse_1HL - corrected_1HL)[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks_H, out, corrected_1HL)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks_H, out, lse_1HL = ctx.saved_tensors
        (grad_out,) = grads
        of_inputs = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse_1HL, **ctx.options
        )
        probability_1HL = torch.exp(sinks_H[None, :, None].to(lse_1HL.dtype) - lse_1HL)
        mean_1HL = (grad_out * out).sum(-1, dtype=lse_1HL.dtype)
        grad_sinks_H = -(probability_1HL * mean_1HL).sum((0, 2)).to(sinks_H.dtype)
        return *of_inputs, grad_sinks_H, None, None
