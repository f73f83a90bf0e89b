"""Training runs of scripts in ``examples/``: command, process tree and time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from verl_pg_plugin.cli.demo import read_steps

REPOSITORY = Path(__file__).parents[2]
POLL_S = 0.5
TERMINATION_S = 15  # Ray and vLLM need time to stop their children
LOG_LINES_SHOWN = 30
FEW_PROCESSES = (
    # One worker each: every worker imports the rollout engine before the first step.
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "++ray_kwargs.ray_init.include_dashboard=False",
)


@dataclass(frozen=True)
class ScriptRun:
    """Command and output files of a run; ``metrics`` is from verl's file logger."""

    command: list[str]
    environment: dict[str, str]
    metrics: Path
    log: Path

    @classmethod
    def of_example(
        cls, script: str, overrides: list[str], environment: dict[str, str], folder: Path, name: str
    ) -> ScriptRun:
        """Return the run of a script in ``examples/``, by default without checkpoints and validation."""
        metrics = folder / f"{name}.jsonl"
        command = ["bash", str(REPOSITORY / "examples" / script), *overrides]
        unsaved = {"SAVE_FREQ": "-1", "TEST_FREQ": "-1", "RESUME_MODE": "disable"}
        variables = {**unsaved, **environment, "VERL_FILE_LOGGER_PATH": str(metrics)}
        return cls(command, variables, metrics, folder / f"{name}.log")

    def last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


def train(run: ScriptRun, num_steps: int, timeout_s: float) -> tuple[str, list[dict[str, Any]]]:
    """Run to the end and return the outcome and the metrics of the steps; write the last log lines of a failed run."""
    sys.stdout.write(f"{num_steps} steps, log in {run.log}\n")
    sys.stdout.flush()
    outcome, steps = run_to_end(run, timeout_s), read_steps(run.metrics)
    if outcome == "ok" and len(steps) != num_steps:
        outcome = "ended early"
    if outcome != "ok":
        sys.stdout.write(f"{run.last_lines()}\nFAILED after {len(steps)} of {num_steps} steps: {outcome}, {run.log}\n")
    return outcome, steps


def run_to_end(run: ScriptRun, timeout_s: float, kill_when: Callable[[], bool] = lambda: False) -> str:
    """Train for at most ``timeout_s`` seconds and end all processes; return ``ok`` or why the run ended.

    Once ``kill_when()`` is true, the trainer is ended with SIGKILL and the outcome is ``killed``.
    """
    run.log.parent.mkdir(parents=True, exist_ok=True)
    started, killed = time.monotonic(), False
    tree: dict[int, psutil.Process] = {}
    with run.log.open("w") as log:
        process = subprocess.Popen(
            run.command,
            cwd=REPOSITORY,
            env={**os.environ, **run.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # which one signal can end
        )
        try:
            while process.poll() is None and not killed and time.monotonic() - started < timeout_s:
                with suppress(psutil.NoSuchProcess):
                    tree.update({child.pid: child for child in psutil.Process(process.pid).children(recursive=True)})
                time.sleep(POLL_S)
                if killed := kill_when():
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        finally:
            timed_out = process.poll() is None
            _end([psutil.Process(process.pid)] if timed_out else [], list(tree.values()))
            exit_code = process.wait()
    if killed:
        return "killed"
    if timed_out:
        return f"timed out after {timeout_s:.0f} s"
    return "ok" if exit_code == 0 else f"exit code {exit_code}"


def _end(root: list[psutil.Process], tree: list[psutil.Process]) -> None:
    """Terminate, then kill, the remaining processes of a run.

    Ray's daemons and vLLM's engine leave the process group, so each is ended by its psutil handle, which is safe if the
    pid was reused.
    """
    # A run that ended well stops its own children.
    _, left = psutil.wait_procs(tree if not root else [], timeout=TERMINATION_S)
    for process in [*root, *tree] if root else left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs([*root, *tree], timeout=TERMINATION_S)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=TERMINATION_S)
