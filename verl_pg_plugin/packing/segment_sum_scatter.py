"""The segment sum by torch's scatter-add, on any device; the range check and the dtype of the sums.

Shape suffixes: B rows, T tokens of a row, S segments of a row.
"""

import torch


def sum_by_scatter(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """`batch_unsorted_segment_sum` for tensors of checked shapes and dtypes; raises IndexError as it does."""
    if values.device.type != "cpu":
        check_id_range(segment_ids, num_segments)
        return scatter_sum(values, segment_ids, num_segments)
    try:  # On a CPU scatter_add itself refuses an id out of range, before it adds anything in its place.
        return scatter_sum(values, segment_ids, num_segments)
    except RuntimeError:
        check_id_range(segment_ids, num_segments)
        raise


def scatter_sum(values_BT: torch.Tensor, ids_BT: torch.Tensor, num_segments: int) -> torch.Tensor:
    """(B, S) sums of `values`' dtype; the ids are not checked here."""
    summands_BT = widen(values_BT)
    zeros_BS = summands_BT.new_zeros(values_BT.shape[0], num_segments)
    return zeros_BS.scatter_add_(1, ids_BT.long(), summands_BT).to(values_BT.dtype)


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
