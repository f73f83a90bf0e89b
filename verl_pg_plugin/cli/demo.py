"""``demo``: run a few steps of GRPO on the CPU with stock verl and in packed mode, and compare their times."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from verl_pg_plugin.cli import CommandError, count, in_columns

REWARD, TOKENS = "critic/score/mean", "actor/prefix_grouper/"
PHASES = ("gen", "old_log_prob", "ref", "update_actor", "step")
WARM_UP_STEPS, SYSTEM_CHARACTERS = 80, 479
"""With the chat markers a prompt has 512 tokens, one per character."""
MODES = {"stock": (False, 528), "packed": (True, 8192)}
"""``use_prefix_grouper`` and a fast token budget. On a CPU stock verl's sdpa reads a dense mask of all tokens."""


def add_parser(subparsers: Any) -> None:
    about = "train a tiny model on the CPU with stock verl and in packed mode, and compare (six minutes on two cores)"
    parser = subparsers.add_parser("demo", help=about, description=about)
    folder = Path(f"verl_pg_demo-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--folder", type=Path, default=folder, help="new folder for data, checkpoint, logs and metrics")
    parser.add_argument("--steps", type=count, default=5, help="steps of each training (5)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write data and a checkpoint, train in both modes, and print the medians."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from verl_pg_plugin.demo import character_tokenizer, tiny_model, warm_up, write_data

    folder = args.folder.absolute()
    if folder.exists():
        raise CommandError(f"--folder={args.folder}: it exists. Fix: --folder <new folder>")
    disable_progress_bar()
    sys.stderr.write(f"data, checkpoint, logs and metrics go to {folder}\n")
    folder.mkdir(parents=True)
    write_data(folder, length=SYSTEM_CHARACTERS)
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    model = tiny_model(tokenizer)
    warm_up(model, tokenizer, WARM_UP_STEPS, length=SYSTEM_CHARACTERS)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    stock, packed = (train(folder, mode, args.steps) for mode in MODES)
    rows: list[tuple[str, ...]] = [("seconds, median of the steps", "stock verl", "packed", "")]
    for phase in PHASES:
        old, new = (median(step[f"timing_s/{phase}"] for step in steps) for steps in (stock, packed))
        rows.append((phase, f"{old:.2f}", f"{new:.2f}", f"{old / new:.2f}x"))
    tokens = [f"{median(step[f'{TOKENS}{kind}_tokens'] for step in packed):,.0f}" for kind in ("total", "computed")]
    rows.append(("tokens of an update", *tokens, ""))
    rows.append(("reward of the last step", f"{stock[-1][REWARD]:.3f}", f"{packed[-1][REWARD]:.3f}", ""))
    sys.stdout.write("\n".join(["", *in_columns(rows), ""]))
    differs = (step for step, (old, new) in enumerate(zip(stock, packed, strict=True), 1) if old[REWARD] != new[REWARD])
    if first := next(differs, None):
        why = "the modes round differently, and weights drift apart until a sampled token differs"
        sys.stdout.write(f"rewards are equal before step {first}: {why}\n")
    return 0


def train(folder: Path, mode: str, num_steps: int) -> list[dict[str, Any]]:
    """Run one training, log each step as it ends, and return the metrics of all steps."""
    (shares, budget), here, actor = MODES[mode], folder / mode, "actor_rollout_ref.actor"
    log, metrics = here / "log.txt", here / "metrics.jsonl"
    here.mkdir()
    overrides = [
        f"hydra.run.dir={here}",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/test.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
        f"{actor}.use_prefix_grouper={shares}",
        f"{actor}.ppo_max_token_len_per_gpu={budget}",
        f"trainer.total_training_steps={num_steps}",
    ]
    command = [sys.executable, "-m", "verl_pg_plugin.main_ppo", "--config-name", "demo", *overrides]
    environment = {"OMP_NUM_THREADS": str(os.cpu_count()), **os.environ, "VERL_PLATFORM": "cpu"}
    environment["VERL_FILE_LOGGER_PATH"] = str(metrics)
    sys.stderr.write(f"{mode}: starting Ray and verl's trainer\n")
    num_done, ended = 0, False
    with log.open("w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process:
        while not ended:
            time.sleep(0.5)
            ended = process.poll() is not None
            for step in read_steps(metrics)[num_done:]:
                num_done += 1
                seconds = step["timing_s/step"]
                sys.stderr.write(f"{mode}: step {num_done}/{num_steps}, {seconds:.1f} s, reward {step[REWARD]:.3f}\n")
    if process.returncode or num_done < num_steps:
        last = "\n".join(log.read_text().splitlines()[-20:])
        raise CommandError(f"{mode}: exit code {process.returncode} after {num_done} steps; {log} ends with:\n{last}")
    return read_steps(metrics)


def read_steps(metrics: Path) -> list[dict[str, Any]]:
    """Read the metrics of each complete training step from verl's ``file`` logger; validations are skipped."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
    return [step for line in lines if line.endswith("\n") and REWARD in (step := json.loads(line)["data"])]
