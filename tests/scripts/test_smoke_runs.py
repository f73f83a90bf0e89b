"""The rehearsal of what users do with the example scripts finds runs that fail, and all of it passes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.step_runs import ScriptRun
from smoke_runs import SmokeError, SmokeRun, finish, kill_after_first_checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "smoke_runs.py"
GOOD_STEP = {
    "actor/prefix_grouper/dedup_ratio": 8.0,
    "actor/grad_norm": 0.5,
    "training/rollout_actor_probs_pearson_corr": 0.999,
    "timing_s/step": 1.0,
}
SUMMARY = "run summary: {}"


@pytest.fixture
def run(tmp_path: Path) -> SmokeRun:
    return SmokeRun("smoke", "run_qwen3_pg.sh", "cpu", 2, tmp_path, tmp_path / "model", tmp_path / "data", ())


@pytest.fixture
def trained(run: SmokeRun, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Instead of a training: its outcome, its log and its steps, which are two good ones unless told otherwise."""

    def pretend(outcome: str = "ok", log: str = SUMMARY, first_step: int = 1, **changed: float) -> None:
        def write(*_: Any) -> str:
            steps = ({**GOOD_STEP, **changed, "training/global_step": first_step + number} for number in range(2))
            run.script_run().metrics.write_text("".join(json.dumps({"data": step}) + "\n" for step in steps))
            run.script_run().log.write_text(f"{log}\n")
            return outcome

        monkeypatch.setattr("smoke_runs.run_to_end", write)

    return pretend


def test_a_good_run_passes(run: SmokeRun, trained: Callable[..., None]) -> None:
    trained()
    assert [step["training/global_step"] for step in finish(run, 1)] == [1, 2]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"outcome": "exit code 1"}, "exit code 1"),
        ({"first_step": 2}, r"its steps are \[2, 3\]"),
        ({"actor/prefix_grouper/dedup_ratio": 1.0}, "shares no prompts"),
        ({"actor/grad_norm": 0.0}, "no gradient"),
        ({"training/rollout_actor_probs_pearson_corr": float("nan")}, "correlate by nan"),
        ({"log": "Training Progress: 100%"}, "does not end with its summary"),
        ({"log": f"RuntimeError: DataLoader worker (pid 1) is killed by signal: Killed.\n{SUMMARY}"}, "DataLoader"),
        (
            {"log": f"[###] step 2/2 left  0:00:00\n(EngineCore pid=2) Traceback (most recent call last):\n{SUMMARY}"},
            "1 lines of dying.*EngineCore",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_that_went_wrong_is_said_to_have(
    run: SmokeRun, trained: Callable[..., None], fault: dict[str, Any], message: str
) -> None:
    trained(**fault)
    with pytest.raises(SmokeError, match=message):
        finish(run, 1)


def pretend_command(monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    monkeypatch.setattr(
        SmokeRun, "script_run", lambda self: ScriptRun(list(command), {}, self.work_dir / "m", self.work_dir / "log")
    )


def test_a_script_that_ends_before_its_first_checkpoint_is_not_waited_for(
    run: SmokeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_command(monkeypatch, "false")
    with pytest.raises(SmokeError, match="exit code 1 before its first checkpoint"):
        kill_after_first_checkpoint(run, 60)


def test_the_trainer_is_killed_at_its_first_checkpoint_and_what_outlives_it_is_counted(
    run: SmokeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``setsid`` leaves the process group, as Ray's and vLLM's processes do."""
    tracker = run.checkpoints / "latest_checkpointed_iteration.txt"
    script = f"setsid sleep 600 & sleep 1; mkdir {run.checkpoints}; echo -n 1 > {tracker}; sleep 600"
    pretend_command(monkeypatch, "bash", "-c", script)
    monkeypatch.setattr("smoke_runs.SURVIVORS_S", 1)
    assert kill_after_first_checkpoint(run, 60) == 1
    assert run.last_checkpoint == 1


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_tools_kill_and_resume_adapters_and_critic_run_two_steps_each(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    results = [line.split() for line in done.stdout.splitlines() if " ok " in line]
    assert [(line[0], line[3]) for line in results] == [("tools", "ok"), ("lora", "ok"), ("critic", "ok")]
