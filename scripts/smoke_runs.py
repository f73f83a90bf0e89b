"""Run the example scripts for two steps each and check the results.

    python scripts/smoke_runs.py [--runs tools lora critic images] [--timeout 600] [-- OVERRIDE ...]

- tools: several turns with a calculator (verl's ToolAgentLoop), validation before training, TensorBoard, a checkpoint
  after every step; ended with SIGKILL after its first checkpoint, then resumed from it.
- lora: adapters, merged for the plugin's rollout on a CPU, loaded by vLLM on a GPU.
- critic: PPO with a critic.
- images: a vision-language model that counts coloured squares; vLLM needs torchvision for it.

Rollout is vLLM if torch sees a GPU, else the plugin's own. Logs and metrics stay in ``--output-dir``. The exit code is
1 if a run failed or logged the death of a process at its end.
"""

import argparse
import re
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.step_runs import ScriptRun, run_to_end
from data.tiny_training import HEAD_DIM, tiny_environment, tiny_overrides
from make_arithmetic_data import make_arithmetic_data
from make_image_task import make_image_data, make_tiny_vision_checkpoint
from make_tiny_checkpoint import make_tiny_checkpoint
from rich.console import Console

from verl_pg_plugin.cli.demo import read_steps

STEPS = 2
# Log lines of a process that died.
DEATHS = re.compile(r"Traceback \(most recent call last\)|is killed by signal|\*\*\* SIG[A-Z]+ received")
console = Console(width=180, highlight=False, markup=False)


@dataclass(frozen=True)
class SmokeRun:
    """A script of ``examples/`` with overrides. Folders are absolute."""

    name: str
    script: str
    device: str  # "gpu" or "cpu"
    steps: int
    work_dir: Path
    model_path: Path
    data_dir: Path
    overrides: tuple[str, ...]
    response_tokens: int = 8

    @property
    def checkpoints(self) -> Path:
        return self.work_dir / "checkpoints"

    @property
    def last_checkpoint(self) -> int | None:
        """Step of the last whole checkpoint; verl writes this file last."""
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.is_file() and tracker.read_text() else None

    def script_run(self) -> ScriptRun:
        variables = {
            **tiny_environment(self.device, self.work_dir, self.model_path, self.data_dir),
            "MAX_RESPONSE_LENGTH": str(self.response_tokens),
            "TRAIN_BATCH_SIZE": "8",
            "PPO_MINI_BATCH_SIZE": "4",
            "TOTAL_STEPS": str(self.steps),
            "TENSORBOARD_DIR": str(self.work_dir / "tensorboard"),
        }
        folder = f"trainer.default_local_dir={self.checkpoints}"
        overrides = [folder, *tiny_overrides(self.device), *self.overrides]
        return ScriptRun.of_example(self.script, overrides, variables, self.work_dir, self.name)


def finish(run: SmokeRun, timeout_s: float, first_step: int = 1) -> list[dict[str, float]]:
    """Train to the end, check what holds for every run, and return the metrics of the steps."""
    started = run.script_run()
    outcome = run_to_end(started, timeout_s)
    assert outcome == "ok", outcome
    steps = read_steps(started.metrics)
    numbers = [int(step["training/global_step"]) for step in steps]
    assert numbers == list(range(first_step, run.steps + 1)), f"its steps are {numbers}"
    for step in steps:
        assert step["actor/prefix_grouper/dedup_ratio"] > 2, "shares no prompts"
        assert step["actor/grad_norm"] > 0, "has no gradient"
        correlation = step["training/rollout_actor_probs_pearson_corr"]
        assert correlation > 0.95, f"probabilities of rollout and actor correlate by {correlation:.3f} only"
    text = started.log.read_text(errors="replace")
    assert text.splitlines()[-1].startswith("run summary: "), "does not end with its summary"
    # Failed optional imports may log tracebacks at the start, so only lines after the last step count.
    after_it = text.rpartition(f"step:{run.steps} - ")[2]
    deaths = [line for line in after_it.splitlines() if DEATHS.search(line)]
    assert not deaths, f"logs {len(deaths)} lines of dying processes, the first: {deaths[0][:150]}"
    return steps


def run_tools(run: SmokeRun, timeout_s: float) -> str:
    """Kill the run after its first checkpoint and resume it."""
    run = replace(
        run,
        script="run_qwen3_tools_pg.sh",
        response_tokens=96,
        overrides=(
            'trainer.logger=["console","file","tensorboard"]',
            "trainer.val_before_train=True",
            "trainer.save_freq=1",
            "trainer.resume_mode=auto",
            *run.overrides,
        ),
    )
    killed = replace(run, name="tools-killed", steps=50)
    outcome = run_to_end(killed.script_run(), timeout_s, kill_when=lambda: killed.last_checkpoint is not None)
    assert outcome == "killed", f"{outcome}, before its first checkpoint"
    saved = run.last_checkpoint
    steps = finish(replace(run, steps=saved + STEPS), timeout_s, first_step=saved + 1)
    turns = max(step["num_turns/max"] for step in steps)
    assert turns >= 4, f"no response called the tool: at most {turns:.0f} turns"
    first_line = run.script_run().metrics.read_text().splitlines()[0]
    assert "val-core/arithmetic" in first_line, "did not validate before its first step"
    events = list((run.work_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert len(events) == 2, f"TensorBoard has {len(events)} files of two runs"
    assert run.last_checkpoint == saved + STEPS, f"its last checkpoint is of step {run.last_checkpoint}"
    mean_turns = sum(step["num_turns/mean"] for step in steps) / len(steps)
    return f"killed after step {saved}, resumed at {saved + 1}, {mean_turns:.1f} turns"


def run_lora(run: SmokeRun, timeout_s: float) -> str:
    """Train adapters of every linear layer."""
    # The plugin's rollout has no adapter slots; vLLM loads adapters, and weights from the checkpoint.
    rollout = {
        "cpu": "actor_rollout_ref.model.lora.merge=True",
        "gpu": "actor_rollout_ref.rollout.load_format=safetensors",
    }
    adapters = (
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora_alpha=16",
        "actor_rollout_ref.model.target_modules=all-linear",
        rollout[run.device],
    )
    steps = finish(replace(run, overrides=(*adapters, *run.overrides)), timeout_s)
    return f"dedup ratio {steps[-1]['actor/prefix_grouper/dedup_ratio']:.1f}"


def run_critic(run: SmokeRun, timeout_s: float) -> str:
    """Train actor and critic on shared prefixes."""
    steps = finish(replace(run, script="run_qwen3_ppo_pg.sh"), timeout_s)
    for step in steps:
        assert step["critic/prefix_grouper/dedup_ratio"] > 2, "its critic shares no prompts"
        assert step["critic/grad_norm"] > 0, "its critic has no gradient"
    return f"critic's dedup ratio {steps[-1]['critic/prefix_grouper/dedup_ratio']:.1f}"


def run_images(run: SmokeRun, timeout_s: float) -> str:
    """Train on images in prompts, with the data set that does not need qwen-vl-utils."""
    images = ("data.custom_cls.path=pkg://verl_pg_plugin.cpu.image_dataset", "data.custom_cls.name=ImageDataset")
    run = replace(run, script="run_qwen3_vl_pg.sh", response_tokens=4, overrides=(*images, *run.overrides))
    steps = finish(run, timeout_s)
    for step in steps:
        patches, total = (step[f"actor/prefix_grouper/{name}"] for name in ("patches", "total_patches"))
        assert total > 2 * patches > 0, f"computes {patches:.0f} patches for {total:.0f}"
    return f"dedup ratio {steps[-1]['actor/prefix_grouper/dedup_ratio']:.1f}, of patches {total / patches:.1f}"


RUNS = {"tools": run_tools, "lora": run_lora, "critic": run_critic, "images": run_images}


def prepare(name: str, device: str, output_dir: Path) -> dict[str, Path]:
    """Return data and checkpoint of a run; make missing ones."""
    kind = name if name in ("tools", "images") else "text"
    data_dir = output_dir / f"data{'-images' if kind == 'images' else ''}"
    model_path = output_dir / f"model-{device}-{kind}"
    if not data_dir.is_dir():
        (make_image_data if kind == "images" else make_arithmetic_data)(data_dir)
    if not model_path.is_dir():
        on_gpu = device == "gpu"
        if kind == "images":
            make_tiny_vision_checkpoint(model_path, for_vllm=on_gpu)
        else:
            sizes = {"head_dim": HEAD_DIM[device], "vocab_multiple": 64 if on_gpu else 1}
            make_tiny_checkpoint(model_path, tool_calls=kind == "tools", **sizes)
    return {"model_path": model_path, "data_dir": data_dir}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one start of a script")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/smoke"))
    parser.add_argument("overrides", nargs="*", help="verl overrides for every run, after --")
    args = parser.parse_args()
    output_dir = args.output_dir.absolute()
    device = "gpu" if torch.cuda.is_available() else "cpu"
    failed = False
    for name in args.runs:
        run = SmokeRun(
            name=name,
            script="run_qwen3_pg.sh",
            device=device,
            steps=STEPS,
            work_dir=output_dir / name,
            overrides=tuple(args.overrides),
            **prepare(name, device, output_dir),
        )
        shutil.rmtree(run.work_dir, ignore_errors=True)
        start = time.monotonic()
        try:
            outcome = f"ok      {RUNS[name](run, args.timeout)}"
        except AssertionError as error:
            failed = True
            outcome = f"FAILED  {error}"
            log = max(run.work_dir.glob(f"{name}*.log"), key=lambda log: log.stat().st_mtime)
            console.print(replace(run, name=log.stem).script_run().last_lines())
        console.print(f"{name:8} {time.monotonic() - start:4.0f} s  {outcome}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
