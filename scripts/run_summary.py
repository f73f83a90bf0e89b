"""Summarize a training run from the metrics file of verl's ``file`` logger; the last line is ``run summary: {json}``.

    python scripts/run_summary.py METRICS.jsonl --config CONFIG.yaml

CONFIG.yaml is the config that Hydra saved for the run. ``reward_first`` and ``reward_last`` are means over the first
and last fifth of the steps (at least one, at most five). Times are medians in seconds. ``dedup_ratio`` is the mean of
total over computed tokens; ``tokens_saved`` is the mean of total minus computed tokens of a mini-batch. Metrics that
the run does not log are ``null``.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from omegaconf import OmegaConf

from verl_pg_plugin.cli.demo import REWARD, read_steps
from verl_pg_plugin.config import mode_of

DEDUP_RATIO = "actor/prefix_grouper/dedup_ratio"
TOTAL_TOKENS = "actor/prefix_grouper/total_tokens"
COMPUTED_TOKENS = "actor/prefix_grouper/computed_tokens"
ATTENTION_BACKEND = "actor/prefix_grouper/attention_backend/"
TIMING = "timing_s/"
PHASES = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights", "step")


def summarize(steps: list[dict[str, Any]], mode: str) -> dict[str, Any]:
    """Return the summary of a run as a dict for JSON."""

    def values(key: str) -> list[float]:
        return [step[key] for step in steps if key in step]

    def middle(key: str) -> float | None:
        return round(median(values(key)), 4) if values(key) else None

    rewards = values(REWARD)
    window = max(1, min(5, len(rewards) // 5))
    total, computed = values(TOTAL_TOKENS), values(COMPUTED_TOKENS)
    backends = {key.removeprefix(ATTENTION_BACKEND) for step in steps for key in step if ATTENTION_BACKEND in key}
    return {
        "steps": len(steps),
        "mode": mode,
        "attention_backend": ",".join(sorted(backends)) or None,
        "dedup_ratio": round(fmean(values(DEDUP_RATIO)), 4) if values(DEDUP_RATIO) else None,
        "tokens_saved": round(fmean(total) - fmean(computed)) if total and computed else None,
        "tokens_saved_fraction": round(1 - sum(computed) / sum(total), 4) if total and computed else None,
        "reward_first": round(fmean(rewards[:window]), 4),
        "reward_last": round(fmean(rewards[-window:]), 4),
        **{f"time_{name}": middle(TIMING + name) for name in PHASES},
    }


def describe(summary: dict[str, Any]) -> str:
    """Return the summary as lines of text: rewards, saved tokens, times."""
    lines = ["{mode} mode, {steps} steps: reward {reward_first:.3f} at first, {reward_last:.3f} at last"]
    if summary["tokens_saved"] is not None:
        lines.append(
            "shared prefixes: {tokens_saved:,} tokens a mini-batch never computed ({tokens_saved_fraction:.0%}), "
            "dedup ratio {dedup_ratio:.2f}"
        )
    times = [f"{name} {summary[f'time_{name}']:.2f}" for name in PHASES if summary[f"time_{name}"] is not None]
    if times:
        lines.append(f"median seconds: {', '.join(times)}")
    return "\n".join(lines).format(**summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    args = parser.parse_args()
    config, steps = OmegaConf.load(args.config), read_steps(args.metrics)
    loggers = config.trainer.logger
    if "file" not in ([loggers] if isinstance(loggers, str) else loggers):
        sys.stdout.write(f'no run summary: trainer.logger={loggers} writes no metrics to a file; add "file" to it\n')
        return
    if not steps:
        sys.exit(f'error: {args.metrics} holds no training step; train with trainer.logger=["console","file"]')
    summary = summarize(steps, mode_of(config).value)
    sys.stdout.write(f"{describe(summary)}\nrun summary: {json.dumps(summary)}\n")


if __name__ == "__main__":
    main()
