"""Time whole training steps of verl's trainer, phase by phase: each mode through its script in ``examples/``.

    python scripts/bench_step.py --cases 64,8,4,4 --steps 3                         # a rehearsal on a CPU
    python scripts/bench_step.py --model-shape qwen3-4b --cases 4096,1024,4,8 8192,1024,8,4 \
        --modes rmpad packed --steps 3 --timeout 280 --output-dir outputs/step_4b
    python scripts/bench_step.py ... -- actor_rollout_ref.actor.entropy_coeff=0.01   # verl overrides for every run

A checkpoint of the shape is drawn at random (full-size vocabulary), prompts are random words of exactly P tokens, and
responses have exactly R tokens (``ignore_eos``): nothing is learned here, everything is computed. Rollout is vLLM on
GPUs and the plugin's own on a CPU. GRPO with a reference policy, AdamW, FSDP2, gradient checkpointing (on GPUs), one
optimizer step for each training step. Every mode runs in a process tree of its own and gets the same token budget.

In ``--output-dir``: ``bench_step.csv`` (rewritten after every run), and for each run its log and its metrics file.
A run that fails or outlives ``--timeout`` keeps the steps it finished; the exit code is then 1. With ``--resume``, runs
that are complete in an earlier ``bench_step.csv`` of the folder are not run again, so that a command can be split.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")

from benchmarks.common import environment, write_csv
from benchmarks.shapes import SHAPES
from benchmarks.step_inputs import make_checkpoint, make_prompts, word_tokenizer
from benchmarks.step_metrics import StepRow, complete_rows, read_training_steps, rows_of_run, table_of, with_ratios
from benchmarks.step_runs import StepCase, StepMode, StepRun, run_to_end
from rich.console import Console

ROLLOUT_PACKAGES = ("vllm", "ray")
LOG_LINES_SHOWN = 30
console = Console(width=150)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=SHAPES, default="tiny")
    parser.add_argument(
        "--cases", nargs="+", type=StepCase.parse, default=[StepCase(64, 8, 4, 4)], metavar="P,R,n,prompts"
    )
    modes = [StepMode("rmpad"), StepMode("packed")]
    parser.add_argument("--modes", nargs="+", type=StepMode.parse, default=modes, help=StepMode.__doc__)
    parser.add_argument("--steps", type=int, default=3, help="training steps of a run, the first of which warms up")
    parser.add_argument("--ngpus", type=int, default=1)
    parser.add_argument("--max-token-len", type=int, default=20480, help="token budget of a micro-batch, per GPU")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3, help="share of the GPU that vLLM takes")
    parser.add_argument("--cuda-graphs", action="store_true", help="vLLM captures CUDA graphs: start-up is longer")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run, start-up included")
    parser.add_argument("--total-timeout", type=float, default=float("inf"), help="seconds for all runs together")
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/bench_step"), help="checkpoints and run folders")
    parser.add_argument("--output-dir", type=Path, help="CSV, logs and metrics; default: --work-dir/results")
    parser.add_argument("--csv", type=Path, help="the table; default: bench_step.csv in --output-dir")
    parser.add_argument("--resume", action="store_true", help="keep the complete runs of an earlier table")
    parser.add_argument("--prepare-only", action="store_true", help="write checkpoint and prompts, train nothing")
    parser.add_argument("overrides", nargs="*", help="verl overrides for every run, behind --")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step is left out of the figures")
    args.work_dir = args.work_dir.absolute()
    args.output_dir = (args.output_dir or args.work_dir / "results").absolute()
    args.csv = args.csv or args.output_dir / "bench_step.csv"
    return args


def describe_environment() -> dict[str, str]:
    """As in the other benchmarks, with the versions of the rollout engine and of Ray."""
    about = environment()
    for package in ROLLOUT_PACKAGES:
        try:
            about["versions"] += f" {package}={version(package)}"
        except PackageNotFoundError:
            about["versions"] += f" {package}=-"
    return about


def prepare(args: argparse.Namespace, device: str) -> tuple[dict[str, str], Path, dict[StepCase, Path]]:
    """The environment, the checkpoint, and for each case a file of prompts for all its steps; files are kept.

    In a process of its own, whose share of the GPU is free again when the first run starts.
    """
    model_path = args.work_dir / f"model-{args.model_shape}"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        about = pool.submit(describe_environment).result()
        if not model_path.is_dir():
            dtype = torch.bfloat16 if device == "gpu" else torch.float32
            pool.submit(make_checkpoint, model_path, args.model_shape, dtype).result()
    tokenizer = word_tokenizer(SHAPES[args.model_shape]["vocab_size"])
    prompts = {}
    for case in args.cases:
        path = args.work_dir / f"prompts-{args.model_shape}-{case.prompt}-{case.prompts * args.steps}.parquet"
        if not path.is_file():
            make_prompts(path, tokenizer, length=case.prompt, num_prompts=case.prompts * args.steps)
        prompts[case] = path
    return about, model_path, prompts


def measure(
    run: StepRun, args: argparse.Namespace, about: dict[str, str], timeout_s: float
) -> tuple[list[StepRow], str]:
    """Train once, for at most ``timeout_s`` seconds; the rows of the run, and what went wrong or nothing."""
    if timeout_s <= 0:
        return [], f"{run.case} {run.mode}: not started, --total-timeout is used up; go on with --resume"
    run.metrics.unlink(missing_ok=True)
    console.print(f"{run.case} {run.mode}: {run.steps} steps, log in {run.log}")
    outcome, to_first_step = run_to_end(run, timeout_s)
    steps = read_training_steps(run.metrics)
    if outcome == "ok" and len(steps) != run.steps:
        outcome = f"{len(steps)} of {run.steps} steps"
    described = {
        "model": args.model_shape,
        "case": str(run.case),
        "mode": str(run.mode),
        "seconds_before_first_step": to_first_step - steps[0]["timing_s/step"] if to_first_step and steps else None,
        "outcome": outcome,
        "num_gpus": run.num_gpus,
        "max_token_len": run.max_token_len,
        "rollout": "vllm" if run.device == "gpu" else "hf",
        "cuda_graphs": run.cuda_graphs,
        "gpu_memory_utilization": run.gpu_memory_utilization,
        "overrides": " ".join(run.overrides),
        **about,
    }
    failure = ""
    if outcome != "ok":
        failure = f"{run.case} {run.mode}: {outcome}, {len(steps)} of {run.steps} steps, see {run.log}"
        last = run.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        console.print("\n".join([failure, *last]), markup=False, highlight=False)
    return rows_of_run(steps, described), failure


def main() -> int:
    args = parse_args()
    deadline = time.monotonic() + args.total_timeout
    device = "gpu" if torch.cuda.is_available() else "cpu"
    about, model_path, prompts = prepare(args, device)
    if args.prepare_only:
        return 0
    rows = complete_rows(args.csv) if args.resume and args.csv.is_file() else []
    done = {(row.model, row.case, row.mode) for row in rows}
    failures: list[str] = []
    for case, mode in product(args.cases, args.modes):
        if (args.model_shape, str(case), str(mode)) in done:
            console.print(f"{case} {mode}: complete in {args.csv}")
            continue
        name = re.sub(r"[^\w.]+", "-", f"{case}-{mode}")
        run = StepRun(
            case=case,
            mode=mode,
            steps=args.steps,
            device=device,
            num_gpus=args.ngpus,
            max_token_len=args.max_token_len,
            gpu_memory_utilization=args.gpu_memory_utilization,
            cuda_graphs=args.cuda_graphs,
            model_path=model_path,
            prompts=prompts[case],
            work_dir=args.work_dir / "runs" / name,
            metrics=args.output_dir / f"{name}.jsonl",
            log=args.output_dir / f"{name}.log",
            overrides=tuple(args.overrides),
        )
        measured, failure = measure(run, args, about, min(args.timeout, deadline - time.monotonic()))
        failures += [failure] if failure else []
        rows = with_ratios([*rows, *measured])
        if rows:
            write_csv(rows, args.csv)
    console.print(table_of(rows))
    if rows:
        first = rows[0]
        console.print(
            f"{first.device} x{first.num_gpus}, driver {first.driver}, {first.versions}, commit {first.commit}"
        )
    for failure in failures:
        console.print(f"FAILED {failure}", markup=False, highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
