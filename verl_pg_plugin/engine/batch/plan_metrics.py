"""What a mini-batch cost, next to what it would have cost without sharing."""

from collections.abc import Sequence

import numpy as np

from verl_pg_plugin.cost.flops import FORWARDS_OF_AN_UPDATE, ModelFlops
from verl_pg_plugin.engine.batch.micro_batch_plan import MicroBatchPlan
from verl_pg_plugin.layout.order import IntArray


def figures_of_rank(
    plan: MicroBatchPlan,
    num_padding_rows: int,
    carried_bytes: int,
    flops: ModelFlops,
    forward_only: bool,
    patches: Sequence[tuple[IntArray, IntArray]] = (),
    bytes_of_a_copy: int = 0,
) -> dict[str, float]:
    """What the mini-batch was on this rank.

    Args:
        plan: this rank's micro-batches.
        num_padding_rows: rows that were added to them; they count as physical tokens.
        carried_bytes: most memory that rows on their way from one micro-batch to another took.
        flops: of the model.
        forward_only: there was no backward.
        patches: of the pictures of each micro-batch, those that the tower computed and those of all its sequences.
        bytes_of_a_copy: of a key and its value that attention copies, in one layer of this rank.
    """
    forward = flops.forward(plan.layouts) + sum(flops.pictures(computed) for computed, _ in patches)
    alone = float(flops.alone(np.diff(plan.sequences.offsets)).sum()) + sum(
        flops.pictures(shown) for _, shown in patches
    )
    copied = [layout.num_gathered_kv for layout in plan.layouts]
    figures: dict[str, float] = {
        "logical_tokens": sum(layout.num_logical_tokens for layout in plan.layouts),
        "physical_tokens": sum(layout.num_tokens for layout in plan.layouts) + num_padding_rows,
        "padding_tokens": num_padding_rows,
        "prompt_groups": plan.num_prompt_groups,
        "rows_of_groups": plan.num_rows_of_groups,
        "micro_batches": len(plan.layouts),
        "rmpad_micro_batches": plan.num_rmpad,
        "chains": len(plan.chains),
        "carried_rows": plan.carried_rows,
        "exported_rows": plan.exported_rows,
        "flops": forward * (1 if forward_only else FORWARDS_OF_AN_UPDATE),
        "forward": forward,
        "forward_alone": alone,
        "carried_bytes": carried_bytes,
        "copied_keys": sum(copied),
        "copied_bytes": max(copied) * bytes_of_a_copy,
    }
    if flops.tower is None:
        return figures
    shown_and_computed = {
        "patches": sum(int(computed.sum()) for computed, _ in patches),
        "logical_patches": sum(int(shown.sum()) for _, shown in patches),
    }
    return figures | shown_and_computed


TOTALS = (
    "logical_tokens",
    "physical_tokens",
    "padding_tokens",
    "rmpad_micro_batches",
    "chains",
    "carried_rows",
    "exported_rows",
    "patches",  # where the model has a tower, as the next
    "logical_patches",
)


def plan_metrics(ranks: list[dict[str, float]], sp_size: int) -> dict[str, list[float]]:
    """Totals over all ranks, so every rank reports the same figures.

    Args:
        ranks: ``figures_of_rank`` of every device.
        sp_size: devices that share one sequence, and report the same of it.
    """
    total = {name: sum(rank[name] for rank in ranks) / sp_size for name in ranks[0]}
    most = {name: max(rank[name] for rank in ranks) for name in ("carried_bytes", "copied_bytes")}
    metrics = {name: total[name] for name in TOTALS if name in total} | {
        "dedup_ratio": total["logical_tokens"] / total["physical_tokens"],
        "groups_per_micro_batch": total["prompt_groups"] / total["micro_batches"],
        # What sharing whole prompts among their responses gives; the rest of dedup_ratio are prompts that begin alike.
        "dedup_ratio_of_groups": total["logical_tokens"] / total["rows_of_groups"],
        # Without the rows that are exported, which a forward without gradient computes once more.
        "flop_ratio": total["forward_alone"] / total["forward"],
        "peak_carried_gib": most["carried_bytes"] / 2**30,
        "copied_keys_per_row": total["copied_keys"] / total["physical_tokens"],
        "peak_copied_gib": most["copied_bytes"] / 2**30,
    }
    return {f"prefix_grouper/{name}": [value] for name, value in metrics.items()}


def flops_of_a_device(ranks: list[dict[str, float]], sp_size: int) -> float:
    """What each computes on average; the arguments are those of ``plan_metrics``."""
    return sum(rank["flops"] for rank in ranks) / sp_size / len(ranks)
