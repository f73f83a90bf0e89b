"""The gated delta rule over shared rows: one call for each depth of the trie, each from the states of the one before.

A segment starts from the state in which its parent ended. Segments of equal depth do not depend on each other, so they
are the sequences of one varlen call with an initial state each: a GRPO group takes two calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from verl_pg_plugin.attention.gather import to_device
from verl_pg_plugin.layout import PackedLayout

DeltaRule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""fla's or transformers' ``chunk_gated_delta_rule``."""


@dataclass(frozen=True)
class Level:
    """The N segments of one depth.

    Attributes:
        lengths: rows of each.
        cu_seqlens: (N+1,) int64, their bounds if they are laid one after the other.
        num_children: (M,) int64, how many of them continue each of the M segments one depth above, whose children are
            next to each other and in its order; None for the roots.
        has_children: whether a deeper segment continues one of them.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    num_children: torch.Tensor | None
    has_children: bool


@dataclass(frozen=True)
class Levels:
    """T packed rows by the depth of their segments.

    Attributes:
        levels: from the roots down.
        order: (T,) int64, the rows sorted by depth; None where they are.
        inverse: (T,) int64, the place of each row among them.
    """

    levels: tuple[Level, ...]
    order: torch.Tensor | None
    inverse: torch.Tensor | None

    @classmethod
    def from_layout(cls, layout: PackedLayout, device: torch.device) -> Levels:
        """Segments come in the order of a walk through the trie, so siblings are next to each other at their depth."""
        parents, lengths = layout.segment_parent, np.diff(layout.cu_seqlens_q)
        depth = np.zeros(len(parents), dtype=np.int64)
        for segment, parent in enumerate(parents.tolist()):  # parents come first
            depth[segment] = depth[parent] + 1 if parent >= 0 else 0
        levels, above = [], np.zeros(0, dtype=np.int64)
        for d in range(int(depth.max()) + 1):
            members = np.flatnonzero(depth == d)
            num_children = np.bincount(np.searchsorted(above, parents[members]), minlength=len(above)) if d else None
            levels.append(
                Level(
                    lengths=tuple(lengths[members].tolist()),
                    cu_seqlens=to_device(np.cumsum([0, *lengths[members]]), torch.int64, device),
                    num_children=None if num_children is None else to_device(num_children, torch.int64, device),
                    has_children=bool((depth == d + 1).any()),
                )
            )
            above = members
        order = np.argsort(np.repeat(depth, lengths), kind="stable")
        if (np.diff(order) == 1).all():
            return cls(tuple(levels), None, None)
        return cls(
            tuple(levels),
            to_device(order, torch.int64, device),
            to_device(np.argsort(order, kind="stable"), torch.int64, device),
        )


class _Permute(torch.autograd.Function):
    """``index_select`` by a permutation, whose backward is one too and adds nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _HandDown(torch.autograd.Function):
    """Give each child its parent's state; the backward sums over children in their order and adds nothing atomically.

    States are float32 whatever the model computes in, so the sum is not rounded further.
    """

    @staticmethod
    def forward(ctx: Any, state: torch.Tensor, num_children: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(num_children)
        return state.repeat_interleave(num_children, dim=0, output_size=total)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (num_children,) = ctx.saved_tensors
        total = torch.segment_reduce(grads[0].contiguous(), "sum", lengths=num_children, axis=0, unsafe=True)
        return total, None, None


def delta_rule_over(levels: Levels, rule: DeltaRule, rows: tuple[torch.Tensor, ...], **options: Any) -> torch.Tensor:
    """The gated delta rule in which rows see their own sequences only.

    Args:
        levels: of the rows.
        rule: computes one depth.
        rows: (T, H, K) queries and keys, (T, H, V) values, (T, H) log decay and (T, H) beta.
        options: further keywords of ``rule``.

    Returns:
        (T, H, V).
    """
    if levels.order is not None:
        rows = tuple(_Permute.apply(x, levels.order, levels.inverse) for x in rows)
    sizes = [sum(level.lengths) for level in levels.levels]
    parts = zip(*(x.split(sizes) for x in rows), strict=True)
    varlen = _of_varlen if "cu_seqlens" in inspect.signature(rule).parameters else _of_padded
    outs, state = [], None
    for level, part in zip(levels.levels, parts, strict=True):
        if level.num_children is not None:
            state = _HandDown.apply(state, level.num_children, len(level.lengths))
        out, state = varlen(level, rule, part, state, options)
        outs.append(out)
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    return out if levels.order is None else _Permute.apply(out, levels.inverse, levels.order)


def _of_varlen(
    level: Level, rule: DeltaRule, part: tuple[torch.Tensor, ...], state: torch.Tensor | None, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fla's kernels take segments of any length."""
    q, k, v, g, beta = (x.unsqueeze(0) for x in part)
    out, state = rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=level.has_children,
        cu_seqlens=level.cu_seqlens,
        **options,
    )
    return out.squeeze(0), state


def _of_padded(
    level: Level, rule: DeltaRule, part: tuple[torch.Tensor, ...], state: torch.Tensor | None, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' fallback takes a batch of equal lengths: rows of zeros behind a segment leave its state alone."""
    q, k, v, g, beta = (pad_sequence(x.split(level.lengths), batch_first=True) for x in part)
    out, state = rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=level.has_children, **options)
    return torch.cat([line[:length] for line, length in zip(out, level.lengths, strict=True)]), state
