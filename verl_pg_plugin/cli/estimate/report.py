"""The figures of an estimate by budget, and how they are shown."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from verl_pg_plugin.cli.command import CommandError
from verl_pg_plugin.cli.estimate.sources import Model
from verl_pg_plugin.config.compile import decide
from verl_pg_plugin.cost.flops import EXPERTS
from verl_pg_plugin.cost.forecast import Batch, Forecast, Settings, forecast
from verl_pg_plugin.cost.kept_layers import KeptBudget, LayerActivations
from verl_pg_plugin.mixers import count_layers
from verl_pg_plugin.planning.memory import TokenMemory

__all__ = ["best", "by_budget", "kept_budget", "plot", "show", "step_seconds", "to_json"]

USUAL_BUDGETS = (16384, 32768, 65536, 131072)
ACCURACY = "Of 254 measurements on H200s the median error of such a prediction is 5% (scripts/cost_accuracy.py)."


def by_budget(batch: Batch, model: Model, args: argparse.Namespace) -> list[Forecast]:
    """One forecast for each budget, ascending.

    Raises:
        CommandError: a budget that was asked for holds not even the longest sequence, or see ``kept_budget``.
    """
    longest = int(batch.lengths.max())
    usual = {-(-longest // 1024) * 1024, *(budget for budget in USUAL_BUDGETS if budget >= longest)}
    config = model.config.get_text_config()
    memory = TokenMemory.of(config, torch.bfloat16.itemsize, checkpointing=True, keeps_attention=True)
    compiled = are_layers_compiled(args.compile_layers, model)
    kept = kept_budget(args.keep_activations, model, compiled)
    found: list[Forecast] = []
    for budget in sorted(args.budget or usual):
        if budget < longest:
            raise CommandError(f"--budget {budget} does not hold the longest sequence of {longest} tokens")
        settings = Settings(budget, carry=not args.no_carry, compile_layers=compiled, kernel=args.kernel, kept=kept)
        found.append(forecast(batch, model.flops, memory, settings))
        if not args.budget and found[-1].micro_batches == 1:
            break  # a larger one changes nothing
    return found


def are_layers_compiled(asked: str, model: Model) -> bool:
    """What ``prefix_grouper.compile_layers`` comes to under FSDP2 on a GPU.

    Args:
        asked: auto, True or False.
    """
    return decide(asked if asked == "auto" else asked == "True", model.config.model_type, "cuda")[0]


def kept_budget(asked: str | float, model: Model, compiled: bool) -> KeptBudget | None:
    """What ``prefix_grouper.keep_activations`` comes to.

    Args:
        asked: attention, all or GiB.

    Raises:
        CommandError: whole layers are to be kept, and they are not attention and a dense MLP each, or not compiled.
    """
    if asked == "attention":
        return None
    if not compiled:
        raise CommandError(
            f"--keep-activations {asked}: what a layer holds is known for compiled ones alone (others hold more); "
            "leave it away"
        )
    config = model.config.get_text_config()
    if set(count_layers(config)) != {"attention"} or any(getattr(config, name, None) for name in EXPERTS):
        raise CommandError(
            f"--keep-activations {asked}: what a layer of {model.config.model_type} holds is known for attention with "
            "a dense MLP alone; leave it away"
        )
    layer = LayerActivations.of(config, torch.bfloat16)
    return KeptBudget(layer, config.num_hidden_layers, math.inf if asked == "all" else float(asked))


def best(forecasts: list[Forecast], memory_gib: float | None) -> Forecast | None:
    """The fastest update among the budgets whose activations fit, the smaller of equals; None if none fits."""
    fitting = [found for found in forecasts if memory_gib is None or found.activation_gib <= memory_gib]
    return max(fitting, key=lambda found: (round(found.update, 2), -found.budget), default=None)


def step_seconds(found: Forecast, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a step, by stock verl and shared: generation, log-probs once or twice, and the update."""
    passes = 1 if args.no_ref else 2
    log_prob, update = (price / (args.tflops * 1e12) for price in found.alone)
    stock = args.gen_seconds + passes * log_prob + update
    return stock, args.gen_seconds + passes * log_prob / found.old_log_prob + update / found.update


def show(forecasts: list[Forecast], args: argparse.Namespace, remark: str) -> None:
    """Write the table to stdout."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    first = forecasts[0]
    console.print(f"{first.logical_tokens:,} tokens in sequences of their own; {remark}", soft_wrap=True)
    titles = ["budget", "micro-batches", "rows", "dedup", "FLOP bound", "old_log_prob"]
    titles += [*([] if args.no_ref else ["ref"]), "update", *(["step"] if args.gen_seconds is not None else [])]
    table = Table(*titles, "activations GiB", box=None, pad_edge=False)
    for found in forecasts:
        speeds = [found.old_log_prob, *([] if args.no_ref else [found.old_log_prob]), found.update]
        if args.gen_seconds is not None:
            stock, shared = step_seconds(found, args)
            speeds.append(stock / shared)
        cells = [str(found.budget), str(found.micro_batches), f"{found.physical_tokens:,}", f"{found.dedup_ratio:.2f}x"]
        cells += [f"{speed:.2f}x" for speed in (found.flop_bound, *speeds)]
        table.add_row(*cells, f"{found.activation_gib:.1f}")
    console.print(table)
    chosen = best(forecasts, args.memory_gib)
    if chosen is None:
        console.print(f"no budget keeps its activations within {args.memory_gib} GiB; the smallest is {first.budget}")
    else:
        within = f" within {args.memory_gib} GiB of activations" if args.memory_gib is not None else ""
        key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
        console.print(f"best budget{within}: {key}={chosen.budget}", soft_wrap=True)
    console.print(ACCURACY, soft_wrap=True)


def to_json(forecasts: list[Forecast], args: argparse.Namespace) -> str:
    """The figures as a JSON list, one object for each budget."""
    rows: list[dict[str, Any]] = []
    for found in forecasts:
        row = {**asdict(found), "dedup_ratio": found.dedup_ratio, "ref": None if args.no_ref else found.old_log_prob}
        if args.gen_seconds is not None:
            stock, shared = step_seconds(found, args)
            row |= {"step_seconds_stock": stock, "step_seconds_shared": shared, "step": stock / shared}
        rows.append(row)
    return json.dumps(rows, indent=2) + "\n"


def plot(forecasts: list[Forecast], path: Path) -> None:
    """Draw speed-ups and their bound by budget.

    Raises:
        CommandError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise CommandError("--plot needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    budgets = [found.budget for found in forecasts]
    axes.plot(budgets, [found.old_log_prob for found in forecasts], "o-", label="old_log_prob, ref")
    axes.plot(budgets, [found.update for found in forecasts], "s-", label="update")
    axes.axhline(forecasts[0].flop_bound, linestyle="--", color="grey", label="FLOP bound")
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets], fontsize="small")
    top = 1.1 * max(max(found.flop_bound, found.old_log_prob, found.update) for found in forecasts)
    axes.set(xlabel="token budget of a micro-batch", ylabel="predicted speed-up over rmpad", ylim=(0, top))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)
    plt.close(figure)
