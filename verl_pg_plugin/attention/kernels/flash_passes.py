"""A flash kernel's two passes as a ``VarlenAttention`` that copies keys as little as it can.

In the forward the keys of a segment lie side by side, ``[ancestors' rows | own rows]``, so each query's softmax is
computed and rounded once. They are copied inside of the operator, whose results gradient checkpointing keeps: a layer
that is computed again copies nothing.

The backward knows the output and the log-sum-exp of the whole softmax. With those, gradients through some of a query's
keys are what the kernel's backward returns for these keys alone (the identity behind ring attention,
https://arxiv.org/abs/2310.01889). So it runs once for what segments read of their trunks, whose rows lie in one piece
already, and once for the rest. The kernel sums the gradients of a trunk's keys in float32 there, instead of rounding
them for each copy, in an order of its own unless it is told to be deterministic; a query's, of which both calls have a
part, is rounded in each and once more in their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from verl_pg_plugin.attention.gather import GatherIndex, sum_over_readers
from verl_pg_plugin.attention.kernels.inputs import cast_under_autocast
from verl_pg_plugin.attention.key_copies import Bounds, KeyCopies, WithoutTrunks

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Scores:
    """How scores are made, see ``VarlenAttention``."""

    softmax_scale: float
    window_size: int
    softcap: float


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Bounds, Scores], tuple[torch.Tensor, torch.Tensor]]
"""(q_THD, k_KGD, v_KGD, bounds, scores) to the output and the log-sum-exp (H, T); causal."""

Backward = Callable[..., None]
"""(grad_out_THD, q_THD, k_KGD, v_KGD, out_THD, lse_HT, gradients, bounds, scores, causal=) fills ``gradients`` of q, k
and v, in which the heads of a row need not follow each other."""


def as_operator(kernel: str, forward: Forward) -> Any:
    """``forward``, with the copies of its keys, as ``torch.ops.verl_pg_plugin.<kernel>_forward``."""

    def run(q: Any, k: Any, v: Any, rows: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *scores: Any) -> Any:
        if rows is not None:
            k, v = k.index_select(0, rows), v.index_select(0, rows)
        return forward(q, k, v, Bounds(cu_q, cu_k, max_q, max_k), Scores(*scores))

    schema = (
        "(Tensor q, Tensor k, Tensor v, Tensor? rows, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
        "SymInt max_seqlen_k, float softmax_scale, int window_size, float softcap) -> (Tensor, Tensor)"
    )
    return torch.library.custom_op(f"verl_pg_plugin::{kernel}_forward", run, mutates_args=(), schema=schema)


@dataclass(frozen=True)
class FlashAttention:
    """A ``VarlenAttention`` made of a kernel's passes.

    Attributes:
        operator: ``as_operator`` of its forward.
        backward: its backward.
        heads_first: gradients lie in memory as (H, T, D). The graphs of layers that are compiled for any number of rows
            ask for that, and would copy others (AOTAutograd's tangents of symbolic sizes are contiguous).
    """

    operator: Any
    backward: Backward
    heads_first: bool = False

    def __call__(
        self,
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
        copies: KeyCopies | None = None,
    ) -> torch.Tensor:
        """See ``VarlenAttention``.

        Args:
            copies: makes the K keys from those of the T rows, which are given instead.
        """
        tensors = cast_under_autocast(q_THD, k_KGD, v_KGD)
        bounds = Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return _Attend.apply(*tensors, self, bounds, Scores(softmax_scale, window_size, softcap), copies)

    def gradients_of(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Memory for the gradients of (rows, heads, D)."""
        if not self.heads_first:
            return tuple(x.new_empty(x.shape) for x in tensors)
        return tuple(x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1) for x in tensors)


@dataclass(frozen=True)
class _Saved:
    """What a backward starts from."""

    grad_out: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        attention: FlashAttention,
        bounds: Bounds,
        scores: Scores,
        copies: KeyCopies | None,
    ) -> torch.Tensor:
        rows = None if copies is None else copies.index.rows
        bounds_of_op = (bounds.cu_seqlens_q, bounds.cu_seqlens_k, bounds.max_seqlen_q, bounds.max_seqlen_k)
        scores_of_op = (scores.softmax_scale, scores.window_size, scores.softcap)
        out_THD, lse_HT = attention.operator(q_THD, k_TGD, v_TGD, rows, *bounds_of_op, *scores_of_op)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, lse_HT)
        ctx.attention, ctx.bounds, ctx.scores, ctx.copies = attention, bounds, scores, copies
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = _Saved(*grads, *ctx.saved_tensors)
        attention, copies, scores = ctx.attention, ctx.copies, ctx.scores
        if copies is None:
            gradients = _copied(attention, saved, None, ctx.bounds, scores)
        elif copies.backward is None or scores.window_size >= 0:
            gradients = _copied(attention, saved, copies.index, ctx.bounds, scores)
        else:
            gradients = _without_trunks(attention, saved, copies.backward, scores)
        return (*gradients, None, None, None, None)


def _copied(
    attention: FlashAttention, saved: _Saved, index: GatherIndex | None, bounds: Bounds, scores: Scores
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v, of which k and v are copied by ``index``."""
    dq, dk, dv = attention.gradients_of(saved.q, saved.k, saved.v)
    if index is None:
        _run(attention, saved, (dq, dk, dv), bounds, scores)
        return dq, dk, dv
    copied = replace(saved, k=saved.k.index_select(0, index.rows), v=saved.v.index_select(0, index.rows))
    dk_KGD, dv_KGD = torch.empty_like(copied.k), torch.empty_like(copied.v)
    _run(attention, copied, (dq, dk_KGD, dv_KGD), bounds, scores)
    sum_over_readers(dk_KGD, index, dk.dtype, dk)
    sum_over_readers(dv_KGD, index, dv.dtype, dv)
    return dq, dk, dv


def _without_trunks(
    attention: FlashAttention, saved: _Saved, apart: WithoutTrunks, scores: Scores
) -> tuple[torch.Tensor, ...]:
    """The same, of which trunks are not copied."""
    gradients = _copied(attention, saved, apart.rest_index, apart.rest, scores)
    rows, keys = apart.rows, apart.keys
    reads = _Saved(
        saved.grad_out[rows],
        saved.q[rows],
        saved.k[keys],
        saved.v[keys],
        saved.out[rows],
        saved.lse[:, rows].contiguous(),
    )
    through_trunks = attention.gradients_of(reads.q, reads.k, reads.v)
    _run(attention, reads, through_trunks, apart.trunks, scores, causal=False)
    for total, part, where in zip(gradients, through_trunks, (rows, keys, keys), strict=True):
        total[where].add_(part)
    return gradients


def _run(
    attention: FlashAttention,
    saved: _Saved,
    gradients: tuple[torch.Tensor, ...],
    bounds: Bounds,
    scores: Scores,
    causal: bool = True,
) -> None:
    tensors = (saved.grad_out, saved.q, saved.k, saved.v, saved.out, saved.lse)
    attention.backward(*tensors, gradients, bounds, scores, causal=causal)
