"""Gather rows of shared prefixes, with a backward that sums in float32."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_pg_plugin.layout import PackedLayout


@dataclass(frozen=True)
class GatherIndex:
    """Which rows to copy where; legend of ``PackedLayout``. All on one device.

    Attributes:
        rows: (K,) int32 row of each copy.
        row_segment: (T,) int32 segment of each row.
        key_place: (T,) int32 its place among the keys of every segment that reads it.
        reader_bounds, reader_starts: for each segment, where the keys of the segments that read it begin.
    """

    rows: torch.Tensor
    row_segment: torch.Tensor
    key_place: torch.Tensor
    reader_bounds: torch.Tensor
    reader_starts: torch.Tensor

    @classmethod
    def from_layout(cls, layout: PackedLayout, device: torch.device | str, num_cached: int = 0) -> "GatherIndex":
        """A row's copy in a segment that reads it lies at ``key_place`` within that segment's keys.

        Args:
            layout: of the rows.
            device: where the maps go.
            num_cached: rows in front of the layout's own that ``kv_index`` indexes too; every segment that reads any
                reads the first of them, see ``layout.carried``.
        """
        parents, starts = layout.segment_parent.tolist(), layout.cu_seqlens_k[:-1].tolist()
        read = np.add.reduceat(layout.kv_index < num_cached, layout.cu_seqlens_k[:-1]) if num_cached else ()
        # Carried rows that the same segments read are one segment more; the last of them may have no reader.
        ends = np.unique(np.append(np.asarray(read, dtype=np.int64), num_cached))
        ends = ends[ends > 0]
        readers = [layout.cu_seqlens_k[:-1][read >= end].tolist() for end in ends]
        num_before = len(readers)
        readers += [[] for _ in parents]
        for segment in range(len(parents)):
            ancestor = segment
            while ancestor >= 0:
                readers[num_before + ancestor].append(starts[segment])
                ancestor = parents[ancestor]
        num_rows = np.concatenate([np.diff(ends, prepend=0), np.diff(layout.cu_seqlens_q)])
        return cls(
            rows=to_device(layout.kv_index, torch.int32, device),
            row_segment=to_device(np.repeat(np.arange(len(readers)), num_rows), torch.int32, device),
            key_place=to_device(np.concatenate([np.arange(num_cached), layout.key_place]), torch.int32, device),
            reader_bounds=to_device(np.cumsum([0, *map(len, readers)]), torch.int32, device),
            reader_starts=to_device(np.concatenate(readers), torch.int32, device),
        )

    @classmethod
    def of_rows(cls, rows: np.ndarray, num_rows: int, device: torch.device | str) -> "GatherIndex":
        """Any gather from ``num_rows`` rows: each of them counts as a segment, read wherever ``rows`` (K,) names it."""
        return cls(
            rows=to_device(rows, torch.int32, device),
            row_segment=to_device(np.arange(num_rows), torch.int32, device),
            key_place=torch.zeros(num_rows, dtype=torch.int32, device=device),
            reader_bounds=to_device(np.cumsum([0, *np.bincount(rows, minlength=num_rows)]), torch.int32, device),
            reader_starts=to_device(np.argsort(rows, kind="stable"), torch.int32, device),
        )


def to_device(array: np.ndarray, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Copy an index map to the device, see ``send``."""
    return send(torch.from_numpy(np.ascontiguousarray(array)).to(dtype), device)


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on the device; from the host through pinned memory, so that the host does not wait for the copy."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class _GatherRows(torch.autograd.Function):
    """``index_select`` whose backward does not round between the additions.

    A prefix row is read by every response of its group, so its gradient is a sum of as many terms. Adding those
    in bf16, as atomics on a GPU do, loses a bit for every doubling of the group.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: GatherIndex) -> torch.Tensor:
        ctx.index = index
        return x.index_select(0, index.rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return sum_over_readers(grad, ctx.index, grad.dtype), None


def sum_over_readers(
    grad: torch.Tensor, index: GatherIndex, dtype: torch.dtype, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradient of the rows from the gradient (K, ...) of their copies.

    Args:
        total: (rows, heads, D) for the result, in ``dtype`` and of any strides; None for new memory.

    Returns:
        (rows, ...) in ``dtype``: summed in float32 (on a CPU, float64 for float64), in a fixed order, rounded once.
    """
    if grad.is_cuda:
        from verl_pg_plugin.attention.segment_sum import sum_readers

        if total is None:
            total = torch.empty((len(index.row_segment), *grad.shape[1:]), dtype=dtype, device=grad.device)
        if grad.dim() != 3 or grad.stride(-1) != 1:
            grad = grad.contiguous()
        return sum_readers(grad, index.row_segment, index.key_place, index.reader_bounds, index.reader_starts, total)
    accumulate = torch.promote_types(grad.dtype, torch.float32)
    wide = torch.zeros((len(index.row_segment), *grad.shape[1:]), dtype=accumulate, device=grad.device)
    wide.index_add_(0, index.rows, grad.to(accumulate))
    return wide.to(dtype) if total is None else total.copy_(wide)


def gather_rows(x: torch.Tensor, index: GatherIndex) -> torch.Tensor:
    """Rows of ``x`` by index.

    Args:
        x: (T, ...) floating point.
        index: where the rows go.

    Returns:
        (K, ...); gradients are accumulated in float32 (on CPU, float64 for float64), in a fixed order, and
        rounded once to the dtype of ``x``.
    """
    return _GatherRows.apply(x, index)
