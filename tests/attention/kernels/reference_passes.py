"""Both passes of a varlen kernel written out, in the precision of their inputs: flash-attn's, without a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from verl_pg_plugin.attention.kernels.flash_passes import FlashAttention, Scores, as_operator
from verl_pg_plugin.attention.key_copies import Bounds


@dataclass(frozen=True)
class Segment:
    """One segment's rows and keys, and its scores (H, Q, K) of repeated heads; hidden ones are -inf."""

    rows: slice
    keys: slice
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor


def segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scores: Scores, causal: bool
) -> Iterator[Segment]:
    """Those with a row and a key; flash-attn's causal mask lies bottom-right."""
    cu_q, cu_k = bounds.cu_seqlens_q.tolist(), bounds.cu_seqlens_k.tolist()
    repeats = q.shape[1] // k.shape[1]
    for s in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        num_q, num_k = cu_q[s + 1] - cu_q[s], cu_k[s + 1] - cu_k[s]
        assert num_q <= bounds.max_seqlen_q
        assert num_k <= bounds.max_seqlen_k
        if not num_q or not num_k:
            continue
        k_s, v_s = k[keys].repeat_interleave(repeats, 1), v[keys].repeat_interleave(repeats, 1)
        scores_HQK = torch.einsum("qhd,khd->hqk", q[rows], k_s) * scores.softmax_scale
        if causal:
            behind = torch.arange(num_q)[:, None] + num_k - num_q - torch.arange(num_k)
            hidden = behind < 0
            if scores.window_size >= 0:
                hidden |= behind > scores.window_size
            scores_HQK = scores_HQK.masked_fill(hidden, float("-inf"))
        yield Segment(rows, keys, k_s, v_s, scores_HQK)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=q.dtype)
    for segment in segments(q, k, v, bounds, scores, causal=True):
        lse[:, segment.rows] = segment.scores.logsumexp(-1)
        out[segment.rows] = torch.einsum("hqk,khd->qhd", segment.scores.softmax(-1), segment.v)
    return out, lse


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradients: tuple[torch.Tensor, ...],
    bounds: Bounds,
    scores: Scores,
    *,
    causal: bool,
) -> None:
    """From the log-sum-exp and the output it is given, whatever softmax these are of."""
    assert lse.is_contiguous(), "flash-attn reads it so"
    for gradient in gradients:
        gradient.zero_()
    dq, dk, dv = gradients
    heads, kv_heads = q.shape[1], k.shape[1]

    def of_kv_heads(x_KHD: torch.Tensor) -> torch.Tensor:
        return x_KHD.unflatten(1, (kv_heads, heads // kv_heads)).sum(2)

    for segment in segments(q, k, v, bounds, scores, causal):
        rows, keys = segment.rows, segment.keys
        p_HQK = (segment.scores - lse[:, rows, None]).exp()
        delta_HQ = (grad_out[rows] * out[rows]).sum(-1).T
        dp_HQK = torch.einsum("qhd,khd->hqk", grad_out[rows], segment.v)
        ds_HQK = p_HQK * (dp_HQK - delta_HQ[..., None]) * scores.softmax_scale
        dq[rows] += torch.einsum("hqk,khd->qhd", ds_HQK, segment.k)
        dk[keys] += of_kv_heads(torch.einsum("hqk,qhd->khd", ds_HQK, q[rows]))
        dv[keys] += of_kv_heads(torch.einsum("hqk,qhd->khd", p_HQK, grad_out[rows]))


attend = FlashAttention(as_operator("reference", forward), backward)
