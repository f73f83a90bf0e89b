"""One training run of ``bench_step.py``: its command, its process tree and its time limit."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import psutil

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = {
    "rmpad": "run_qwen3_rmpad.sh",
    "packed": "run_qwen3_pg.sh",
    "prefix_grouper": "run_qwen3_prefix_grouper.sh",
}
POLL_S = 0.5
# Ray and vLLM stop their children when they are asked to; what is left after this long is killed.
TERMINATION_S = 15


@dataclass(frozen=True)
class StepCase:
    """Tokens of every prompt and response, responses per prompt, prompts per training step (on all GPUs together)."""

    prompt: int
    response: int
    n: int
    prompts: int

    @classmethod
    def parse(cls, text: str) -> StepCase:
        try:
            case = cls(*(int(part) for part in text.split(",")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text}: a case is P,R,n,prompts, such as 4096,1024,4,8") from None
        if min(case.prompt, case.response, case.n, case.prompts) < 1:
            raise argparse.ArgumentTypeError(f"{text}: every number of a case is at least 1")
        return case

    def __str__(self) -> str:
        return f"{self.prompt},{self.response},{self.n},{self.prompts}"


@dataclass(frozen=True)
class StepMode:
    """A mode of this plugin, by its example script, with options of the section ``prefix_grouper`` behind a colon."""

    name: str
    options: str = ""

    @classmethod
    def parse(cls, text: str) -> StepMode:
        name, _, options = text.partition(":")
        if name not in SCRIPTS or (name == "rmpad" and options):
            raise argparse.ArgumentTypeError(f"{text}: choose {', '.join(SCRIPTS)}; only ours take :KEY=VALUE,...")
        return cls(name, options)

    def __str__(self) -> str:
        return f"{self.name}:{self.options}" if self.options else self.name

    @property
    def overrides(self) -> list[str]:
        return [f"prefix_grouper.{option}" for option in self.options.split(",") if option]


@dataclass(frozen=True)
class StepRun:
    """A case in a mode. Folders are absolute; ``metrics`` and ``log`` are written while it runs."""

    case: StepCase
    mode: StepMode
    steps: int
    device: str  # "gpu" or "cpu"
    num_gpus: int
    max_token_len: int
    gpu_memory_utilization: float
    cuda_graphs: bool
    model_path: Path
    prompts: Path
    work_dir: Path
    metrics: Path
    log: Path
    overrides: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """What the example scripts read."""
        case = self.case
        return {
            "DEVICE": self.device,
            "PYTHON": sys.executable,
            "WORK_DIR": str(self.work_dir),
            "MODEL_PATH": str(self.model_path),
            "TRAIN_FILES": str(self.prompts),
            "VAL_FILES": str(self.prompts),
            "NGPUS_PER_NODE": str(self.num_gpus),
            "ROLLOUT_N": str(case.n),
            "TRAIN_BATCH_SIZE": str(case.prompts),
            "PPO_MINI_BATCH_SIZE": str(case.prompts),
            "MAX_PROMPT_LENGTH": str(case.prompt),
            "MAX_RESPONSE_LENGTH": str(case.response),
            "MAX_TOKEN_LEN": str(self.max_token_len),
            "GPU_MEMORY_UTILIZATION": str(self.gpu_memory_utilization),
            "TOTAL_STEPS": str(self.steps),
            "TOTAL_EPOCHS": "1",
            "VERL_FILE_LOGGER_PATH": str(self.metrics),
        }

    def command(self) -> list[str]:
        """The example script of the mode; what the user adds comes last and wins."""
        case = self.case
        return [
            "bash",
            str(REPOSITORY / "examples" / SCRIPTS[self.mode.name]),
            "actor_rollout_ref.rollout.ignore_eos=True",
            f"actor_rollout_ref.rollout.enforce_eager={not self.cuda_graphs}",
            f"actor_rollout_ref.rollout.max_model_len={case.prompt + case.response}",
            # One worker each: every further one imports the rollout engine before the first step.
            "actor_rollout_ref.rollout.agent.num_workers=1",
            "reward.num_workers=1",
            f"reward.custom_reward_function.path={REPOSITORY / 'scripts' / 'benchmarks' / 'step_reward.py'}",
            "++ray_kwargs.ray_init.include_dashboard=False",
            *self.mode.overrides,
            *self.overrides,
        ]


class ScriptRun(Protocol):
    """What a process tree is started from; ``metrics`` and ``log`` are written while it runs."""

    @property
    def metrics(self) -> Path: ...

    @property
    def log(self) -> Path: ...

    def command(self) -> list[str]: ...

    def environment(self) -> dict[str, str]: ...


def start(run: ScriptRun, log: IO[str]) -> subprocess.Popen[bytes]:
    """The run's script in a session of its own, which a signal ends as a whole; all it says goes to ``log``."""
    return subprocess.Popen(
        run.command(),
        cwd=REPOSITORY,
        env={**os.environ, **run.environment()},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run_to_end(run: ScriptRun, timeout_s: float) -> tuple[str, float | None]:
    """Train, for at most ``timeout_s`` seconds, and leave no process of the run behind.

    Returns:
        ``ok`` or what ended the run, and the seconds from its start to the metrics of its first step.
    """
    run.log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    first_step: float | None = None
    tree: dict[int, psutil.Process] = {}
    with run.log.open("w") as log:
        process = start(run, log)
        try:
            while process.poll() is None and time.monotonic() - started < timeout_s:
                tree.update({child.pid: child for child in _descendants(process.pid)})
                if first_step is None and run.metrics.is_file() and run.metrics.stat().st_size:
                    first_step = time.monotonic() - started
                time.sleep(POLL_S)
        finally:
            timed_out = process.poll() is None
            _end([psutil.Process(process.pid)] if timed_out else [], list(tree.values()))
            exit_code = process.wait()
    if timed_out:
        return f"timed out after {timeout_s:.0f} s", first_step
    return ("ok" if exit_code == 0 else f"exit code {exit_code}"), first_step


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end(root: list[psutil.Process], tree: list[psutil.Process]) -> None:
    """Terminate, then kill, what is left of a run.

    Ray's daemons and vLLM's engine leave the process group, so each process is ended by its own handle, which also
    knows when its number has since gone to another process.
    """
    # A run that ended well stops its own children; give them the time.
    _, left = psutil.wait_procs(tree if not root else [], timeout=TERMINATION_S)
    for process in [*root, *tree] if root else left:
        _signal(process, kill=False)
    _, left = psutil.wait_procs([*root, *tree], timeout=TERMINATION_S)
    for process in left:
        _signal(process, kill=True)
    psutil.wait_procs(left, timeout=TERMINATION_S)


def _signal(process: psutil.Process, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
