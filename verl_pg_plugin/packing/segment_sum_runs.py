"""The segment sum on a CPU where equal ids lie side by side, as in a packed row: one vectorised sum a run.

Scatter-add is slowest exactly there, since an addition waits for the one before it at the same address.

Shape suffixes: B rows, T tokens of a row, F tokens of all rows laid end to end, R runs of equal ids, S segments.
"""

import numpy as np
import torch

from verl_pg_plugin.packing.segment_sum_scatter import check_id_range, sum_by_scatter, widen

# Measured against scatter-add: shorter runs, or fewer tokens in all, cost more in overhead than they save.
MIN_RUN_TOKENS = 32
MIN_TOKENS = 1 << 15


def sum_by_runs(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """`batch_unsorted_segment_sum` for CPU tensors of checked shapes and dtypes; scatter-add where runs are short."""
    bs, seq = segment_ids.shape
    # The first row tells which of the two it will be, for a fraction of the cost of looking at all of them.
    if segment_ids.numel() < MIN_TOKENS or MIN_RUN_TOKENS * _changes(segment_ids[0].numpy()) > seq:
        return sum_by_scatter(values, segment_ids, num_segments)
    ids_F = segment_ids.reshape(-1).numpy()
    starts_R = _run_starts(ids_F, seq)
    if MIN_RUN_TOKENS * len(starts_R) > len(ids_F):
        return sum_by_scatter(values, segment_ids, num_segments)
    ids_R = ids_F[starts_R]
    check_id_range(torch.from_numpy(ids_R), num_segments)
    values_F = widen(values.detach()).reshape(-1).numpy()
    sums_R = torch.from_numpy(np.add.reduceat(values_F, starts_R, dtype=values_F.dtype))
    place_R = torch.from_numpy(starts_R // seq * num_segments + ids_R)
    sums = sums_R.new_zeros(bs * num_segments).index_add_(0, place_R, sums_R)
    return sums.view(bs, num_segments).to(values.dtype)


def _changes(ids_T: np.ndarray) -> int:
    return int(np.count_nonzero(ids_T[1:] != ids_T[:-1]))


def _run_starts(ids_F: np.ndarray, seq: int) -> np.ndarray:
    """(R,) places of the first token of each run; every row of `seq` tokens starts a run of its own."""
    is_start_F = np.empty(ids_F.size, dtype=bool)
    np.not_equal(ids_F[1:], ids_F[:-1], out=is_start_F[1:])
    is_start_F[::seq] = True
    return np.flatnonzero(is_start_F)
