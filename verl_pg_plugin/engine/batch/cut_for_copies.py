"""Says where keys that attention copies, and not rows, cut a mini-batch into more micro-batches."""

from __future__ import annotations

import numpy as np

from verl_pg_plugin.batching.copied_keys import CopiedKeys, KeysOfNeighbours
from verl_pg_plugin.engine.batch.micro_batch_plan import MicroBatchPlan


def copies_count(plan: MicroBatchPlan, copies: CopiedKeys) -> bool:
    """Whether some micro-batch of this rank copies more keys than are free."""
    return bool(copies.weight) and any(copies.take(lay.num_copied_keys, lay.num_rows) > 0 for lay in plan.layouts)


def cut_for_copies(plan: MicroBatchPlan, copies: CopiedKeys, carries: bool, bytes_of_a_copy: int) -> str | None:
    """What copies did to the plan of this rank, in one line; None where they did nothing.

    Cuts the mini-batch again, with copies and without; ask ``copies_count`` first.

    Args:
        plan: of the mini-batch.
        copies: with which it was made.
        carries: groups go on in the next micro-batch.
        bytes_of_a_copy: of a key and its value in one layer of this rank, with their gradients in an update.
    """
    counted, rows_alone = plan.parts_with(copies), plan.parts_with(CopiedKeys())
    recomputing, spared = (sum(part.recompute_attention for part in parts) for parts in (counted, rows_alone))
    if len(counted) <= len(rows_alone) and recomputing <= spared:
        return None
    order = plan.sequences.order()
    starts = np.flatnonzero(order.num_shared == 0)
    keys = np.diff(KeysOfNeighbours(order).before[[*starts, len(order.sequences)]])
    rows, most = np.add.reduceat(order.num_new, starts), int(np.argmax(keys))
    how = "groups go on in carried parts, which copy less" if carries else "each group is computed anew in every part"
    return (
        f"attention would copy {keys[most] / rows[most]:.0f} keys per row of a group, "
        f"{keys[most] * bytes_of_a_copy / 2**30:.2f} GiB in a layer, so {len(counted)} micro-batches are made where "
        f"rows alone need {len(rows_alone)}, and {recomputing} compute attention again where {spared} would; {how}"
    )
