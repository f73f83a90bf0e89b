"""Train the arithmetic task in each mode with several seeds and write rewards and metrics by step to a CSV file.

    python scripts/learning_curves.py --output-dir outputs/learning --csv docs/data/learning_cpu.csv
    python scripts/draw_figures.py learning_cpu

Rollout is vLLM if torch sees a GPU (bf16, heads of 64), else the plugin's own (float32). A seed determines the order of
questions and the responses. A training step is one optimizer step: with several mini-batches the modes' balance would
fill them with different samples, so that runs could not be compared seed by seed.

Runs with complete metrics in ``--output-dir`` are kept, so an interrupted command continues.
"""

import argparse
import json
import shutil
import sys
from collections import namedtuple
from itertools import product
from pathlib import Path

import torch
from benchmarks.common import write_csv
from benchmarks.step_runs import ScriptRun, train
from data.tiny_training import HEAD_DIM, tiny_environment, tiny_overrides
from make_arithmetic_data import make_arithmetic_data
from make_tiny_checkpoint import make_tiny_checkpoint
from rich.console import Console

from verl_pg_plugin.cli.demo import read_steps

MODES = ("rmpad", "packed")
PROMPTS_PER_STEP = 16
console = Console(width=150, markup=False, highlight=False)
METRICS = {
    "reward": "critic/score/mean",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "rollout_actor_corr": "training/rollout_actor_probs_pearson_corr",
    "rollout_actor_max_diff": "training/rollout_probs_diff_max",
    "rollout_log_ppl": "rollout_corr/rollout_log_ppl",  # of the sampled tokens
    "response_tokens": "response_length/mean",
    "dedup_ratio": "actor/prefix_grouper/dedup_ratio",
    "step_s": "timing_s/step",
}


class LearningStep(namedtuple("LearningStep", ("mode", "seed", "step", *METRICS))):
    """One training step. ``kl`` is verl's KL loss to the reference policy (low-variance estimator, nats)."""


def run_of(mode: str, seed: int, args: argparse.Namespace, device: str) -> ScriptRun:
    """Return the run of ``examples/run_qwen3_pg.sh`` in a mode with a seed; the user's overrides come last."""
    folder = args.output_dir / f"{device}-{mode}-{seed}"
    variables = {
        **tiny_environment(device, folder, args.output_dir / f"model-{device}", args.output_dir / "data"),
        "USE_PREFIX_GROUPER": str(mode == "packed"),
        "TRAIN_BATCH_SIZE": str(PROMPTS_PER_STEP),
        "PPO_MINI_BATCH_SIZE": str(PROMPTS_PER_STEP),
        "TOTAL_STEPS": str(args.steps),
    }
    overrides = [
        f"trainer.experiment_name=learning_{mode}_{seed}",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        *tiny_overrides(device),
        *args.overrides,
    ]
    return ScriptRun.of_example("run_qwen3_pg.sh", overrides, variables, folder, "run")


def curve_of(metrics: Path, mode: str, seed: int) -> list[LearningStep]:
    """Return the finished steps of a run; a missing metric is an error."""
    return [
        LearningStep(mode, seed, int(step["training/global_step"]), *(step[key] for key in METRICS.values()))
        for step in ({METRICS["dedup_ratio"]: None, **step} for step in read_steps(metrics))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one run, start-up included")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/learning"))
    parser.add_argument("--csv", type=Path, help="default: learning.csv in --output-dir")
    parser.add_argument("overrides", nargs="*", help="verl overrides for every run, after --")
    args = parser.parse_args()
    args.output_dir = args.output_dir.absolute()
    device = "gpu" if torch.cuda.is_available() else "cpu"
    if not (args.output_dir / "data").is_dir():
        # Each question once an epoch: seeds of equal prompts in a step depend on their order of arrival.
        make_arithmetic_data(args.output_dir / "data", repeat=1)
    if not (args.output_dir / f"model-{device}").is_dir():
        make_tiny_checkpoint(args.output_dir / f"model-{device}", head_dim=HEAD_DIM[device])
    curves: list[LearningStep] = []
    failed = False
    # By seed, so that an interrupted command leaves complete pairs.
    for seed, mode in product(args.seeds, args.modes):
        run = run_of(mode, seed, args, device)
        settings = json.dumps([run.command, run.environment], indent=1)
        kept = run.log.with_name("settings.json")
        if kept.is_file() and kept.read_text() != settings:
            console.print(f"error: {run.log.parent} holds a run with other settings; choose another --output-dir")
            return 2
        if len(read_steps(run.metrics)) != args.steps:
            shutil.rmtree(run.log.parent, ignore_errors=True)
            run.log.parent.mkdir(parents=True)
            kept.write_text(settings)
            outcome, _ = train(run, args.steps, args.timeout)
            failed |= outcome != "ok"
        curve = curve_of(run.metrics, mode, seed)
        curves += curve
        if curve:
            write_csv(curves, args.csv or args.output_dir / "learning.csv")
            rewards = [step.reward for step in curve]
            fifth = max(1, len(rewards) // 5)
            first, last = (sum(part) / fifth for part in (rewards[:fifth], rewards[-fifth:]))
            console.print(f"{mode}, seed {seed}: {len(curve)} steps, reward {first:.3f} at first, {last:.3f} at last")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
