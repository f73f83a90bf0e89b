"""Sum of values per segment, for each row of a batch."""

from typing import TypeVar

import numpy as np
import torch

Array = TypeVar("Array", torch.Tensor, np.ndarray)


def batch_unsorted_segment_sum(values: Array, segment_ids: Array, num_segments: int) -> Array:
    """`output[b, s]` = sum of `values[b, t]` over all `t` with `segment_ids[b, t] == s`.

    For tensors (CPU and GPU, differentiable in `values` any number of times) and NumPy arrays. float16 and bfloat16
    values are summed in float32 and rounded once, other dtypes in their own precision. On a GPU floats are added
    atomically in no fixed order, and checking ids (IndexError) costs one synchronisation.

    Args:
        values: (bs, seq), a floating or integer dtype.
        segment_ids: (bs, seq), an integer dtype, in `[0, num_segments)`; in any order.

    Returns:
        (bs, num_segments) of `values`' dtype, on its device; 0 for a segment without tokens.
    """
    if isinstance(values, np.ndarray) and isinstance(segment_ids, np.ndarray):
        return batch_unsorted_segment_sum(_as_tensor(values), _as_tensor(segment_ids), num_segments).numpy()
    if not (isinstance(values, torch.Tensor) and isinstance(segment_ids, torch.Tensor)):
        raise TypeError(
            "values and segment_ids must both be tensors or both be NumPy arrays, got "
            f"{type(values).__name__} and {type(segment_ids).__name__}"
        )
    _check_arguments(values, segment_ids, num_segments)
    if values.is_cuda:
        _check_id_range(segment_ids, num_segments)
    summands = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    try:
        sums = summands.new_zeros(len(values), num_segments).scatter_add_(1, segment_ids.long(), summands)
    except RuntimeError:  # on a CPU scatter_add_ checks the ids itself
        _check_id_range(segment_ids, num_segments)
        raise
    return sums.to(values.dtype)


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    # torch needs writable arrays of non-negative strides and native byte order; others are copied.
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


def _check_id_range(segment_ids: torch.Tensor, num_segments: int) -> None:
    if segment_ids.numel() == 0:
        return
    lowest, highest = torch.stack(torch.aminmax(segment_ids)).tolist()
    if lowest < 0 or highest >= num_segments:
        raise IndexError(
            f"segment_ids are in [{lowest}, {highest}], but num_segments={num_segments} allows only "
            f"[0, {num_segments - 1}]: raise num_segments, or correct the ids"
        )
