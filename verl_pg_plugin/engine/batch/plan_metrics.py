"""What a mini-batch cost, next to what it would have cost without sharing."""

from collections.abc import Sequence

import torch.distributed as dist
from verl.utils.flops_counter import get_device_flops

from verl_pg_plugin.cost.flops import FORWARDS_OF_AN_UPDATE, ModelFlops
from verl_pg_plugin.engine.batch.micro_batch_plan import MicroBatchPlan
from verl_pg_plugin.engine.ranks import over_ranks
from verl_pg_plugin.layout.prefix_order import IntArray


def plan_metrics(
    plan: MicroBatchPlan,
    num_padding_rows: int,
    carried_bytes: int,
    flops: ModelFlops,
    seconds: float,
    forward_only: bool,
    dp_group: dist.ProcessGroup | None,
    sp_size: int,
    patches: Sequence[tuple[IntArray, IntArray]] = (),
) -> dict[str, list[float]]:
    """Totals over all data-parallel ranks, so every rank reports the same figures.

    Args:
        plan: this rank's micro-batches.
        num_padding_rows: rows that were added to them; they count as physical tokens.
        carried_bytes: most memory that rows on their way from one micro-batch to another took.
        flops: of the model.
        seconds: this rank took for the mini-batch.
        forward_only: there was no backward.
        dp_group: ranks to sum over; None for this one alone.
        sp_size: devices that share one sequence.
        patches: of the pictures of each micro-batch, those that the tower computed and those of all its sequences.
    """
    local = {
        "logical_tokens": sum(layout.num_logical_tokens for layout in plan.layouts),
        "physical_tokens": sum(layout.num_rows for layout in plan.layouts) + num_padding_rows,
        "padding_tokens": num_padding_rows,
        "groups": sum(layout.num_roots for layout in plan.layouts),
        "micro_batches": len(plan.layouts),
        "rmpad": plan.num_rmpad,
        "chains": len(plan.chains),
        "carried_rows": plan.carried_rows,
        "exported_rows": plan.exported_rows,
        "flops": (flops.forward(plan.layouts) + sum(flops.pictures(computed) for computed, _ in patches))
        * (1 if forward_only else FORWARDS_OF_AN_UPDATE),
        "patches": sum(int(computed.sum()) for computed, _ in patches),
        "logical_patches": sum(int(shown.sum()) for _, shown in patches),
        "seconds": seconds,
    }
    ranks = over_ranks({**local, "carried_bytes": carried_bytes}, dp_group)
    total = {name: sum(rank[name] for rank in ranks) for name in local}
    peak = get_device_flops("T") * 1e12 * len(ranks) * sp_size * max(rank["seconds"] for rank in ranks)
    pictures = {name: [float(total[name])] for name in ("patches", "logical_patches")} if flops.tower else {}
    return {
        **{f"prefix_grouper/{name}": value for name, value in pictures.items()},
        "prefix_grouper/logical_tokens": [float(total["logical_tokens"])],
        "prefix_grouper/physical_tokens": [float(total["physical_tokens"])],
        "prefix_grouper/padding_tokens": [float(total["padding_tokens"])],
        "prefix_grouper/dedup_ratio": [total["logical_tokens"] / total["physical_tokens"]],
        "prefix_grouper/groups_per_micro_batch": [total["groups"] / total["micro_batches"]],
        "prefix_grouper/rmpad_micro_batches": [float(total["rmpad"])],
        "prefix_grouper/mfu_physical": [total["flops"] / peak],
        "prefix_grouper/chains": [float(total["chains"])],
        "prefix_grouper/carried_rows": [float(total["carried_rows"])],
        "prefix_grouper/exported_rows": [float(total["exported_rows"])],
        "prefix_grouper/peak_carried_gib": [max(rank["carried_bytes"] for rank in ranks) / 2**30],
    }
