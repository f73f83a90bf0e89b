"""Says where keys that attention copies, and not rows, cut a mini-batch into more micro-batches."""

from __future__ import annotations

import numpy as np
from tensordict import TensorDict

from verl_pg_plugin.batching.copied_keys import CopiedKeys, KeysOfNeighbours
from verl_pg_plugin.engine.batch.micro_batch_plan import CarryPolicy, MicroBatchPlan, num_parts


def copies_count(plan: MicroBatchPlan, copies: CopiedKeys) -> bool:
    """Whether some micro-batch of this rank copies more keys than are free."""
    return bool(copies.weight) and any(copies.take(lay.num_copied_keys, lay.num_rows) > 0 for lay in plan.layouts)


def cut_for_copies(
    plan: MicroBatchPlan,
    data: TensorDict,
    sp_size: int,
    min_dedup_ratio: float,
    carry: CarryPolicy | None,
    copies: CopiedKeys,
    bytes_of_a_copy: int,
) -> str | None:
    """What copies did to the plan of this rank, in one line; None where they did nothing.

    Cuts the mini-batch again, with copies and without; ask ``copies_count`` first.

    Args:
        plan: made from ``data`` with the next four, see ``plan_micro_batches``.
        bytes_of_a_copy: of a key and its value in one layer of this rank, with their gradients in an update.
    """
    order = plan.sequences.order()
    cut, recomputing = num_parts(plan.sequences, order, data, sp_size, min_dedup_ratio, carry, copies)
    rows_alone, spared = num_parts(plan.sequences, order, data, sp_size, min_dedup_ratio, carry, CopiedKeys())
    if cut <= rows_alone and recomputing <= spared:
        return None
    starts = np.flatnonzero(order.num_shared == 0)
    keys = np.diff(KeysOfNeighbours(order).before[[*starts, len(order.sequences)]])
    rows, most = np.add.reduceat(order.num_new, starts), int(np.argmax(keys))
    how = (
        "each group is computed anew in every part"
        if carry is None
        else "groups go on in carried parts, which copy less"
    )
    return (
        f"attention would copy {keys[most] / rows[most]:.0f} keys per row of a group, "
        f"{keys[most] * bytes_of_a_copy / 2**30:.2f} GiB in a layer, so {cut} micro-batches are made where rows alone "
        f"need {rows_alone}, and {recomputing} compute attention again where {spared} would; {how}"
    )
