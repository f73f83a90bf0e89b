"""Train the arithmetic task in each mode with several seeds and write how it learned, step by step, to a CSV file.

    python scripts/learning_curves.py --output-dir outputs/learning --csv docs/data/learning_cpu.csv
    python scripts/learning_curves.py --modes rmpad packed --seeds 1 --timeout 500 --csv docs/data/learning_gpu.csv

verl's trainer runs with its real rollout: vLLM where torch sees a GPU (in bf16, with heads of 64), the plugin's own
rollout on a CPU (in float32). A seed draws the order of the questions and the responses. A training step is one
optimizer step: the modes balance differently, and would fill several mini-batches with different rows, so that not
even exact modes could be compared seed by seed.

Runs whose metrics are complete in ``--output-dir`` are kept: a command that was interrupted goes on where it stopped.
``scripts/plot_learning.py`` draws the CSV file and says where packed mode leaves the band of the rmpad runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NoReturn

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")

from benchmarks.common import write_csv
from benchmarks.step_metrics import read_training_steps
from benchmarks.step_runs import REPOSITORY, run_to_end
from data.tiny_training import HEAD_DIM, tiny_environment, tiny_overrides
from make_arithmetic_data import make_arithmetic_data
from make_tiny_checkpoint import make_tiny_checkpoint
from rich.console import Console

FLAGS = {"rmpad": ("False", "True"), "prefix_grouper": ("True", "False"), "packed": ("True", "True")}
PROMPTS_PER_STEP = 16
LOG_LINES_SHOWN = 30
console = Console(width=150)


@dataclass(frozen=True)
class LearningStep:
    """One training step of one run. ``kl`` is verl's KL loss to the reference policy (low-variance estimator, nats)."""

    mode: str
    seed: int
    step: int
    reward: float
    kl: float
    entropy: float
    grad_norm: float
    rollout_actor_corr: float
    rollout_actor_max_diff: float
    response_tokens: float
    dedup_ratio: float | None
    step_s: float


METRICS = {
    "reward": "critic/score/mean",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "rollout_actor_corr": "training/rollout_actor_probs_pearson_corr",
    "rollout_actor_max_diff": "training/rollout_probs_diff_max",
    "response_tokens": "response_length/mean",
    "step_s": "timing_s/step",
}
DEDUP_RATIO = "actor/prefix_grouper/dedup_ratio"


@dataclass(frozen=True)
class LearningRun:
    """A mode with a seed. Folders are absolute; ``metrics`` and ``log`` are written while it runs."""

    mode: str
    seed: int
    steps: int
    device: str  # "gpu" or "cpu"
    lr: float
    model_path: Path
    data_dir: Path
    work_dir: Path
    overrides: tuple[str, ...]

    @property
    def metrics(self) -> Path:
        return self.work_dir / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.work_dir / "run.log"

    def environment(self) -> dict[str, str]:
        """What ``examples/run_qwen3_pg.sh`` reads."""
        use_prefix_grouper, use_remove_padding = FLAGS[self.mode]
        return {
            **tiny_environment(self.device, self.work_dir, self.model_path, self.data_dir),
            "USE_PREFIX_GROUPER": use_prefix_grouper,
            "USE_REMOVE_PADDING": use_remove_padding,
            "TRAIN_BATCH_SIZE": str(PROMPTS_PER_STEP),
            "PPO_MINI_BATCH_SIZE": str(PROMPTS_PER_STEP),
            "LR": str(self.lr),
            "TOTAL_STEPS": str(self.steps),
            "VERL_FILE_LOGGER_PATH": str(self.metrics),
        }

    @property
    def settings(self) -> str:
        """All that a run follows from, as text."""
        return json.dumps([self.command(), self.environment()], indent=1)

    def was_run_otherwise(self) -> bool:
        kept = self.work_dir / "settings.json"
        return kept.is_file() and kept.read_text() != self.settings

    def keep_settings(self) -> None:
        self.work_dir.mkdir(parents=True, exist_ok=True)
        (self.work_dir / "settings.json").write_text(self.settings)

    def command(self) -> list[str]:
        """The example script; what the user adds comes last and wins."""
        return [
            "bash",
            str(REPOSITORY / "examples" / "run_qwen3_pg.sh"),
            f"trainer.experiment_name=learning_{self.mode}_{self.seed}",
            f"data.seed={self.seed}",
            f"actor_rollout_ref.rollout.seed={self.seed}",
            *tiny_overrides(self.device),
            *self.overrides,
        ]


def fail(message: str) -> NoReturn:
    console.print(f"error: {message}", markup=False, highlight=False)
    sys.exit(2)


def curve_of(run: LearningRun) -> list[LearningStep]:
    """The steps that a run has finished so far; a metric that it does not log is an error."""
    return [
        LearningStep(
            mode=run.mode,
            seed=run.seed,
            step=int(step["training/global_step"]),
            dedup_ratio=step.get(DEDUP_RATIO),
            **{name: step[key] for name, key in METRICS.items()},
        )
        for step in read_training_steps(run.metrics)
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=FLAGS, default=["rmpad", "packed"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one run, start-up included")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/learning"))
    parser.add_argument("--csv", type=Path, help="default: learning.csv in --output-dir")
    parser.add_argument("overrides", nargs="*", help="verl overrides for every run, behind --")
    args = parser.parse_args()
    args.output_dir = args.output_dir.absolute()
    args.csv = args.csv or args.output_dir / "learning.csv"
    return args


def main() -> int:
    args = parse_args()
    device = "gpu" if torch.cuda.is_available() else "cpu"
    data_dir, model_path = args.output_dir / "data", args.output_dir / f"model-{device}"
    if not data_dir.is_dir():
        make_arithmetic_data(data_dir)
    if not model_path.is_dir():
        make_tiny_checkpoint(model_path, head_dim=HEAD_DIM[device])
    curves: list[LearningStep] = []
    failures: list[str] = []
    # Seed by seed, so that an interrupted command leaves whole pairs.
    for seed, mode in product(args.seeds, args.modes):
        run = LearningRun(
            mode=mode,
            seed=seed,
            steps=args.steps,
            device=device,
            lr=args.lr,
            model_path=model_path,
            data_dir=data_dir,
            work_dir=args.output_dir / f"{device}-{mode}-{seed}",
            overrides=tuple(args.overrides),
        )
        if run.was_run_otherwise():
            fail(f"{run.work_dir} holds a run with other settings; choose another --output-dir")
        if len(curve_of(run)) != args.steps:
            shutil.rmtree(run.work_dir, ignore_errors=True)
            run.keep_settings()
            console.print(f"{mode}, seed {seed}: {args.steps} steps, log in {run.log}")
            outcome, _ = run_to_end(run, args.timeout)
            if outcome == "ok" and len(curve_of(run)) != args.steps:
                outcome = f"{len(curve_of(run))} of {args.steps} steps"
            if outcome != "ok":
                failures.append(f"{mode}, seed {seed}: {outcome}, see {run.log}")
                last = run.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
                console.print("\n".join(last), markup=False, highlight=False)
        curve = curve_of(run)
        curves += curve
        if curve:
            write_csv(curves, args.csv)
            rewards = [step.reward for step in curve]
            fifth = max(1, len(rewards) // 5)
            first, last = (sum(part) / fifth for part in (rewards[:fifth], rewards[-fifth:]))
            console.print(f"{mode}, seed {seed}: {len(curve)} steps, reward {first:.3f} at first, {last:.3f} at last")
    for failure in failures:
        console.print(f"FAILED {failure}", markup=False, highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
