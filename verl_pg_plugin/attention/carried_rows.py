"""Rows that also read keys and values which another micro-batch has computed (carried prefixes).

A trie that exceeds a micro-batch is computed in parts, see ``layout.carried``. In training the parts run in reverse
order: an *export* computes without gradient what a part reads, the part's backward adds to float32 sums, and the part
that owns the rows, which comes later, adds those sums in its own backward and rounds once. The scheme is known as
schedule-level prefix reuse (https://arxiv.org/abs/2606.01143).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from verl_pg_plugin.attention.carry_stack import CarryBlock
from verl_pg_plugin.attention.gather import GatherIndex, sum_over_readers, to_device
from verl_pg_plugin.attention.kernels.selection import VarlenKernel
from verl_pg_plugin.attention.key_copies import Bounds, KeyCopies
from verl_pg_plugin.attention.packed_rows import PackedRows
from verl_pg_plugin.attention.shared_rows import AttentionOptions
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.layout.order import IntArray


@dataclass(frozen=True)
class Carrying:
    """What one forward of a part reads from the stack, leaves for it, and owes to parts that ran before.

    Attributes:
        layout: the part's rows, or those of its export.
        read: blocks of the rows ``0 .. num_cached``.
        leave: filled with the rows handed over; None in training, where an export leaves them.
        owed: blocks of the rows handed over, with the sums of their gradients; empty outside training.
        is_export: no sequence reads this forward's outputs.
    """

    layout: PackedLayout
    read: list[CarryBlock]
    leave: CarryBlock | None = None
    owed: list[CarryBlock] = field(default_factory=list)
    is_export: bool = False

    def join_columns(self, columns_NC: torch.Tensor) -> torch.Tensor:
        """Head outputs of carried rows in front of those of the own ones.

        Args:
            columns_NC: (N, C) of the own head rows of all ranks that share the rows.

        Returns:
            (carried heads + N, C), as ``response_head`` of the layout indexes them.
        """
        if self.leave is not None:
            self._leave_columns(self.leave, columns_NC.detach())
        return columns_NC if self.is_export else _JoinColumns.apply(columns_NC, self)

    def _leave_columns(self, block: CarryBlock, columns_NC: torch.Tensor) -> None:
        layout = self.layout
        block.columns = columns_NC.new_zeros(len(layout.publish), columns_NC.shape[1])
        if len(layout.publish_heads):
            heads, rows = (_index(x, columns_NC.device) for x in (self.handed_over_heads, layout.publish_heads))
            block.columns[rows] = columns_NC[heads]
        if self.is_export:
            block.column_sums = _wide_zeros(block.columns)

    @property
    def handed_over_heads(self) -> IntArray:
        """Index into the own head rows of those whose outputs are handed over."""
        return np.searchsorted(self.layout.head_index, self.layout.publish[self.layout.publish_heads])


class CarriedRows(PackedRows):
    """Packed rows whose keys are ``[carried rows | own rows]``."""

    def __init__(self, carrying: Carrying, handover: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.carrying = carrying
        self.handover = handover

    @classmethod
    def carry(cls, carrying: Carrying, kernel: VarlenKernel, device: torch.device | str) -> CarriedRows:
        """Move the index maps of a part to ``device``, without waiting for the copies."""
        layout = carrying.layout
        index = partial(GatherIndex.from_layout, layout, device, layout.num_cached)
        return cls(
            carrying,
            to_device(layout.publish, torch.int64, device),
            kernel=kernel,
            num_rows=layout.num_tokens,
            bounds=Bounds.of(layout, device),
            copies=KeyCopies(index()) if layout.num_gathered_kv else None,
            layout=layout,
        )

    def read(
        self, k_TGD: torch.Tensor, v_TGD: torch.Tensor, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        block, layer = self.carrying.leave, options.layer_idx
        if block is not None:
            if (layer, 0) in block.key_values:
                raise RuntimeError(
                    f"two attention layers call themselves layer_idx {layer}: set ++prefix_grouper.carry=never"
                )
            for which, x in enumerate((k_TGD, v_TGD)):
                kept = x.detach().index_select(0, self.handover)
                block.key_values[layer, which] = kept
                if self.carrying.is_export:
                    block.key_value_sums[layer, which] = _wide_zeros(kept)
        return _ReadRows.apply(k_TGD, self, layer, 0), _ReadRows.apply(v_TGD, self, layer, 1), {}


class _ReadRows(torch.autograd.Function):
    """Keys or values of ``[carried | own]`` rows, gathered for every segment; all sums in float32."""

    @staticmethod
    def forward(ctx: Any, own_TGD: torch.Tensor, rows: CarriedRows, layer: int, which: int) -> torch.Tensor:
        ctx.rows, ctx.layer, ctx.which = rows, layer, which
        carried = [block.key_values[layer, which] for block in rows.carrying.read]
        joined = torch.cat([*carried, own_TGD])
        return joined if rows.copies is None else joined.index_select(0, rows.copies.index.rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        rows: CarriedRows = ctx.rows
        carrying, num_cached = rows.carrying, rows.carrying.layout.num_cached
        wide = torch.promote_types(grad.dtype, torch.float32)
        # A copy in either case: what is owed is added in place.
        copies = rows.copies
        total = grad.to(wide, copy=True) if copies is None else sum_over_readers(grad, copies.index, wide)
        for block in carrying.read:
            block.key_value_sums[ctx.layer, ctx.which].add_(total[block.start : block.stop])
        own = total[num_cached:]
        if carrying.owed:
            # Taken out, since verl keeps the graph, and so its blocks, until the next forward is done.
            owed = [block.key_value_sums.pop((ctx.layer, ctx.which)) for block in carrying.owed]
            own.index_add_(0, rows.handover, torch.cat(owed).to(wide))
        return own.to(grad.dtype), None, None, None


class _JoinColumns(torch.autograd.Function):
    """``[carried | own]`` head outputs, with the same sums."""

    @staticmethod
    def forward(ctx: Any, own_NC: torch.Tensor, carrying: Carrying) -> torch.Tensor:
        ctx.carrying = carrying
        heads = carrying.layout.cached_heads
        if not len(heads):
            return own_NC.clone()
        carried = torch.cat([_columns(block.columns) for block in carrying.read])
        return torch.cat([carried[_index(heads, own_NC.device)], own_NC])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        carrying: Carrying = ctx.carrying
        layout, num_cached = carrying.layout, len(carrying.layout.cached_heads)
        for block in carrying.read:
            first, last = np.searchsorted(layout.cached_heads, [block.start, block.stop])
            if last > first:
                rows = _index(layout.cached_heads[first:last] - block.start, grad.device)
                sums = _columns(block.column_sums)
                sums.index_add_(0, rows, grad[first:last].to(sums.dtype))
        own = grad[num_cached:].clone()
        if carrying.owed and len(layout.publish_heads):
            owed = torch.cat([_columns(block.column_sums) for block in carrying.owed])
            heads, rows = (_index(x, grad.device) for x in (carrying.handed_over_heads, layout.publish_heads))
            own.index_add_(0, heads, owed[rows].to(own.dtype))
        return own, None


def _columns(columns: torch.Tensor | None) -> torch.Tensor:
    assert columns is not None, "a block is on the stack once its head outputs are there"
    return columns


def _index(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(values, torch.int64, device)


def _wide_zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
