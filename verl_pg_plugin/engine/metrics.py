"""Count what a mini-batch cost with and without sharing; ``docs/metrics.md`` explains the names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from verl.utils.metric import AggregationType, Metric

from verl_pg_plugin.engine.plan import Plan
from verl_pg_plugin.modalities.images import shown_images
from verl_pg_plugin.planning.cost import ModelFlops

TOTALS = (
    *("total_tokens", "computed_tokens", "padding_tokens", "unshared_micro_batches", "split_groups", "cached_tokens"),
    *("prefill_tokens", "verified_sequences", "patches", "total_patches"),
)
PLAIN_MEANS = (
    *("critic/vf_clipfrac", "critic/vpred_mean", "distillation/ppo_kl", "distillation/pg_clipfrac"),
    *("distillation/pg_clipfrac_lower", "distillation/student_mass", "distillation/teacher_mass"),
    "distillation/overlap_ratio",
)
"""Means over loss tokens that verl's losses return as plain numbers."""


@dataclass
class MiniBatchCosts:
    """Counts that are known only after a mini-batch has run."""

    verifies: bool = False  # the verifier is enabled
    num_padding: int = 0
    peak_cached_bytes: int = 0
    num_verified: int = 0
    verify_max_error: float = 0.0


def figures_of_rank(plan: Plan, flops: ModelFlops, costs: MiniBatchCosts) -> dict[str, float]:
    """Count tokens, micro-batches, bytes and FLOPs of a mini-batch on this rank."""
    layouts = [planned.layout for planned in plan.micro_batches]
    lengths, prompts = plan.sequences.lengths, plan.sequences.prompt_lengths
    groups = plan.sequences.prompt_groups
    _, first = np.unique(groups, return_index=True)
    images = [image for of_one in plan.sequences.images for image in of_one]
    encoded = [
        image
        for planned in (plan.micro_batches if images else ())
        for image in shown_images(planned.layout, plan.sequences.select(planned.sequences))
    ]
    shown, computed = (np.array([len(image.pixels) for image in of], dtype=np.int64) for of in (images, encoded))
    figures: dict[str, float] = {
        "total_tokens": sum(layout.num_total_tokens for layout in layouts),
        "computed_tokens": sum(layout.num_tokens for layout in layouts) + costs.num_padding,
        "padding_tokens": costs.num_padding,
        "prompt_groups": sum(len(np.unique(groups[planned.sequences])) for planned in plan.micro_batches),
        # Tokens to compute if samples shared only whole prompts.
        "tokens_of_groups": int((lengths - prompts).sum() + (prompts[first] - 1).sum()),
        "micro_batches": len(layouts),
        "unshared_micro_batches": sum(not layout.shares_tokens for layout in layouts),
        "split_groups": plan.num_split_groups,
        "cached_tokens": sum(layout.num_cached for layout in layouts),
        "prefill_tokens": sum(layout.prefill.num_tokens for layout in layouts if layout.prefill is not None),
        "cached_bytes": costs.peak_cached_bytes,
        "host_bytes": max(plan.policy.host_bytes(p.level, p.layout.num_tokens) for p in plan.micro_batches),
    }
    if not flops.unknown:
        alone = float(flops.alone(lengths).sum()) + flops.images(shown)
        figures |= {"forward": flops.forward(layouts) + flops.images(computed), "forward_alone": alone}
    if costs.verifies:
        figures |= {"verified_sequences": costs.num_verified, "verify_max_error": costs.verify_max_error}
    if flops.vision is not None:
        figures |= {"patches": int(computed.sum()), "total_patches": int(shown.sum())}
    return figures


def mini_batch_metrics(ranks: list[dict[str, float]], sp_size: int, kernel: str) -> dict[str, list[float]]:
    """Return equal metrics on every rank from the figures of all ``ranks``; ``sp_size`` of them share each sequence."""
    total = {name: sum(rank[name] for rank in ranks) / sp_size for name in ranks[0]}
    metrics = {name: total[name] for name in TOTALS if name in total} | {
        "dedup_ratio": total["total_tokens"] / total["computed_tokens"],
        "groups_per_micro_batch": total["prompt_groups"] / total["micro_batches"],
        # The rest of dedup_ratio comes from prompts with a common prefix.
        "dedup_ratio_of_groups": total["total_tokens"] / max(total["tokens_of_groups"], 1),
        "prefix_cache_gib": max(rank["cached_bytes"] for rank in ranks) / 2**30,
        f"attention_backend/{kernel}": 1.0,
    }
    if "forward" in total:  # without prefills
        metrics["flop_ratio"] = total["forward_alone"] / total["forward"]
    if total.get("host_bytes"):
        metrics["host_gib"] = max(rank["host_bytes"] for rank in ranks) / 2**30
    if total.get("verified_sequences"):
        metrics["verify_max_error"] = max(rank["verify_max_error"] for rank in ranks)
    return {f"prefix_grouper/{name}": [value] for name, value in metrics.items()}


def weigh_means(micro_batches: Sequence[dict[str, Any]], weights: Sequence[float]) -> None:
    """Multiply, in place, the token means of each micro-batch (as ``actor/ppo_kl``) by its ``weights``.

    A weight is the micro-batch's number of loss tokens over the mean of all ranks' micro-batches. verl averages these
    metrics over micro-batches and ranks, and the weighted mean is the mean over all tokens, however they are cut.
    """
    for metrics, weight in zip(micro_batches, weights, strict=True):
        for name, metric in metrics.items():
            if isinstance(metric, Metric):  # some of the bypass mode are extremes
                if metric.aggregation is AggregationType.MEAN and not name.startswith("rollout_corr/"):
                    metric.values = [value * weight for value in metric.values]
            elif name in PLAIN_MEANS:
                metrics[name] = metric * weight
