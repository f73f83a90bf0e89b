"""Sum of a batch's values per segment, every row by itself.

Shape suffixes: B rows (`bs`), T tokens of a row (`seq`), S segments of a row.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from verl_pg_plugin.packing.segment_sum_runs import sum_by_runs
from verl_pg_plugin.packing.segment_sum_scatter import sum_by_scatter

Array = TypeVar("Array", torch.Tensor, np.ndarray)
Route = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


# From this many threads on, torch's scatter-add, which uses them all, overtakes the sum over runs, which uses one.
THREADS_OF_SCATTER = 4


def batch_unsorted_segment_sum(values: Array, segment_ids: Array, num_segments: int) -> Array:
    """`output[b, s]` = sum of `values[b, t]` over all `t` with `segment_ids[b, t] == s`.

    For tensors (CPU and GPU, differentiable in `values`, any number of times) and for NumPy arrays (by the CPU route).
    float16 and bfloat16 values are summed in float32 and rounded once, other dtypes in themselves. The result
    of a call does not change from run to run on the CPU, nor on a GPU with up to 64 segments and Triton installed; GPU
    sums over more segments are atomic adds in any order.
    Ids are always checked, which on a GPU costs one synchronisation: not for use inside CUDA graph capture.

    Args:
        values: (bs, seq), a floating or integer dtype.
        segment_ids: (bs, seq), an integer dtype, in `[0, num_segments)`; in any order.
        num_segments: segments of each row, at least 1.

    Returns:
        (bs, num_segments) of `values`' dtype, on its device; 0 for a segment without tokens.

    Raises:
        IndexError: a segment id out of range; the GPU stays usable.
        TypeError: values that are neither floating nor integer, ids that are not integer, or tensors mixed with arrays.
        ValueError: shapes that are not one (bs, seq), tensors on two devices, or `num_segments < 1`.
    """
    if isinstance(values, np.ndarray) and isinstance(segment_ids, np.ndarray):
        sums = batch_unsorted_segment_sum(_as_tensor(values), _as_tensor(segment_ids), num_segments)
        return sums.numpy()
    if not (isinstance(values, torch.Tensor) and isinstance(segment_ids, torch.Tensor)):
        raise TypeError(
            "values and segment_ids must both be tensors or both be NumPy arrays, got "
            f"{type(values).__name__} and {type(segment_ids).__name__}"
        )
    _check_arguments(values, segment_ids, num_segments)
    route = _route(values)
    if values.requires_grad:
        return _SegmentSum.apply(values, segment_ids, num_segments, route)
    return route(values, segment_ids, num_segments)


class _SegmentSum(torch.autograd.Function):
    """Forward: the route. Backward: each token's gradient is that of its segment, a gather."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int, route: Route
    ) -> torch.Tensor:
        ctx.save_for_backward(segment_ids)
        return route(values, segment_ids, num_segments)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (segment_ids,) = ctx.saved_tensors
        return grad_outputs[0].gather(1, segment_ids.long()), None, None, None


def _route(values: torch.Tensor) -> Route:
    if values.is_cuda:
        from verl_pg_plugin.packing.segment_sum_cuda import segment_sum_cuda

        return segment_sum_cuda
    few_threads = torch.get_num_threads() < THREADS_OF_SCATTER
    return sum_by_runs if values.device.type == "cpu" and few_threads else sum_by_scatter


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    # torch shares memory with writable arrays of non-negative strides and native byte order; others are copied.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def _check_arguments(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> None:
    if values.ndim != 2 or values.shape != segment_ids.shape:
        raise ValueError(
            "values and segment_ids must have one shape (bs, seq), got "
            f"{tuple(values.shape)} and {tuple(segment_ids.shape)}"
        )
    if values.device != segment_ids.device:
        raise ValueError(f"values are on {values.device} and segment_ids on {segment_ids.device}: move one of them")
    if values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"values must be floating or integer, got {values.dtype}")
    if segment_ids.is_floating_point() or segment_ids.is_complex() or segment_ids.dtype == torch.bool:
        raise TypeError(f"segment_ids must be integer, got {segment_ids.dtype}")
    if num_segments < 1:
        raise ValueError(f"num_segments must be at least 1, got {num_segments}")
