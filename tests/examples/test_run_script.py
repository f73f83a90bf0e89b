"""examples/run_qwen3_pg.sh stops with one clear line before anything heavy starts, and saves as verl's examples do."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "run_qwen3_pg.sh"
DATA = {"MODEL_PATH": "{}", "TRAIN_FILES": "{}/data.parquet", "VAL_FILES": "{}/data.parquet"}


def run_script(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run with ``{}`` replaced by a folder that has data and a ``python`` that prints its arguments."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "data.parquet").write_text("")
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    given = {name: value.format(tmp_path) for name, value in {"WORK_DIR": "{}/work", **environment}.items()}
    return subprocess.run(["bash", str(SCRIPT)], env={**inherited, **given}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"MODEL_PATH": "/some/where"}, "error: TRAIN_FILES is not set"),
        ({"TRAIN_FILES": "/some/where"}, "error: MODEL_PATH is not set"),
        ({**DATA, "TRAIN_FILES": "/none/train.parquet"}, "/none/train.parquet does not exist"),
        ({**DATA, "MAX_TOKEN_LEN": "8k"}, "error: MAX_TOKEN_LEN=8k is not a number of tokens"),
        ({**DATA, "DEVICE": "tpu"}, "error: DEVICE=tpu is neither cpu nor gpu"),
    ],
)
def test_missing_and_wrong_inputs_are_named(tmp_path: Path, variables: dict[str, str], says: str) -> None:
    done = run_script(tmp_path, **variables)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("script", ["run_qwen3_pg.sh", "run_qwen3_tools_pg.sh", "run_qwen3_agent_pg.sh"])
def test_help_lists_every_variable_of_the_script(tmp_path: Path, script: str) -> None:
    command = ["bash", str(SCRIPT.with_name(script)), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []
    internal = {"BASH_SOURCE", "OMP_NUM_THREADS", "!name"}
    # The scripts for tools and agents call the first.
    text = SCRIPT.read_text() + SCRIPT.with_name(script).read_text()
    read = {part.split(":-")[0] for part in text.split("${")[1:] if ":-" in part.split("}")[0]} - internal
    assert read >= {"MODEL_PATH", "NGPUS_PER_NODE", "LR"}
    assert not {name for name in read if name not in done.stdout}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["trainer.save_freq=20", "trainer.test_freq=5", "trainer.resume_mode=auto"]),
        ({"DEVICE": "cpu"}, ["trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.resume_mode=disable"]),
        (
            {"SAVE_FREQ": "7", "TEST_FREQ": "3", "RESUME_MODE": "disable", "CHECKPOINT_DIR": "/kept"},
            ["trainer.save_freq=7", "trainer.test_freq=3", "trainer.resume_mode=disable"],
        ),
    ],
    ids=["gpu", "cpu", "set"],
)
def test_gpu_runs_save_and_resume(tmp_path: Path, variables: dict[str, str], expected: list[str]) -> None:
    runs = [run_script(tmp_path, **DATA, PYTHON="{}/python", **variables) for _ in range(2)]
    outputs = [done.stdout.splitlines() for done in runs]
    assert all(override in arguments for override in expected for arguments in outputs), runs[0].stderr
    folders = [next(a for a in arguments if a.startswith("trainer.default_local_dir=")) for arguments in outputs]
    # Runs resume from a fixed folder; each trial on a CPU has its own.
    assert (folders[0] == folders[1]) == ("DEVICE" not in variables)
