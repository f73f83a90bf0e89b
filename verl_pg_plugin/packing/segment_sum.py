"""Sum of a batch's values per segment, every row by itself.

Shape suffixes: B rows (`bs`), T tokens of a row (`seq`), S segments of a row.
"""

from typing import TypeVar

import numpy as np
import torch

# Rows of at least MIN_LANED_TOKENS in all whose equal ids lie side by side are summed in LANES interleaved partial
# sums: additions into one address wait for each other, so a run of equal ids is otherwise the slowest input of all.
LANES = 16
MIN_LANED_TOKENS = 1 << 16


Array = TypeVar("Array", torch.Tensor, np.ndarray)


def batch_unsorted_segment_sum(values: Array, segment_ids: Array, num_segments: int) -> Array:
    """`output[b, s]` = sum of `values[b, t]` over all `t` with `segment_ids[b, t] == s`.

    The seed 000 operation, for tensors (CPU and GPU, differentiable in `values`, any number of times) and for NumPy
    arrays (by the CPU route). float16 and bfloat16 values are summed in float32 and rounded once;
    every other dtype is summed in itself. The result of a call does not change from run to run on the CPU, nor on a
    GPU with up to 64 segments and Triton installed; GPU sums over more segments are atomic adds in any order.
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
    if values.is_cuda:
        from verl_pg_plugin.packing.segment_sum_cuda import segment_sum_cuda

        return segment_sum_cuda(values, segment_ids, num_segments)
    summands, ids = widen(values), segment_ids.long()
    if values.device.type == "cpu":
        return _segment_sum_cpu(summands, ids, num_segments).to(values.dtype)
    check_id_range(ids, num_segments)
    return scatter_sum(summands, ids, num_segments).to(values.dtype)


def widen(values: torch.Tensor) -> torch.Tensor:
    """The values in the dtype they are summed in: float32 for float16 and bfloat16, else their own."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def check_id_range(segment_ids: torch.Tensor, num_segments: int) -> None:
    """Raise IndexError for ids outside `[0, num_segments)`: one pass over the ids, one synchronisation."""
    if segment_ids.numel() == 0:
        return
    lowest, highest = torch.stack(torch.aminmax(segment_ids)).tolist()
    if lowest < 0 or highest >= num_segments:
        raise IndexError(
            f"segment_ids lie in [{lowest}, {highest}], but num_segments={num_segments} allows only "
            f"[0, {num_segments - 1}]: raise num_segments, or correct the ids"
        )


def scatter_sum(values: torch.Tensor, ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """(B, T, ...) values summed along dim 1 into (B, S, ...); the ids are int64 and not checked here."""
    zeros = values.new_zeros(values.shape[0], num_segments, *values.shape[2:])
    return zeros.scatter_add(1, ids, values)


def _segment_sum_cpu(values: torch.Tensor, ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Route for the CPU, where scatter_add itself refuses an id out of range before it writes anything."""
    try:
        if ids.numel() >= MIN_LANED_TOKENS and ids.shape[1] % LANES == 0 and _mostly_runs(ids[0]):
            lanes = (values.shape[0], -1, LANES)
            return scatter_sum(values.reshape(lanes), ids.reshape(lanes), num_segments).sum(dim=2)
        return scatter_sum(values, ids, num_segments)
    except RuntimeError:
        check_id_range(ids, num_segments)
        raise


def _mostly_runs(ids_T: torch.Tensor) -> bool:
    return 2 * int((ids_T[1:] == ids_T[:-1]).count_nonzero()) > ids_T.numel()


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
