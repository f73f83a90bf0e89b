"""examples/run_qwen3_pg.sh stops with one clear line before anything heavy starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "run_qwen3_pg.sh"


def run_script(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={**inherited, "WORK_DIR": str(tmp_path / "work"), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("only", ["MODEL_PATH", "TRAIN_FILES", "VAL_FILES"])
def test_half_of_the_inputs_is_an_error_that_names_the_missing_one(tmp_path: Path, only: str) -> None:
    done = run_script(tmp_path, **{only: "/some/where"})
    missing = next(name for name in ("MODEL_PATH", "TRAIN_FILES", "VAL_FILES") if name != only)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {missing} is not set")


def test_a_data_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = run_script(tmp_path, MODEL_PATH="a/b", TRAIN_FILES="/none/train.parquet", VAL_FILES="/none/test.parquet")
    assert done.returncode == 1
    assert "/none/train.parquet does not exist" in done.stderr.splitlines()[-1]


def test_a_device_that_does_not_exist_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_text("")
    data = {name: str(tmp_path / "data.parquet") for name in ("TRAIN_FILES", "VAL_FILES")}
    done = run_script(tmp_path, MODEL_PATH=str(tmp_path), DEVICE="tpu", **data)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: DEVICE=tpu is neither cpu nor gpu"


@pytest.mark.parametrize("script", ["run_qwen3_pg.sh", "run_qwen3_tools_pg.sh", "run_qwen3_agent_pg.sh"])
def test_help_lists_every_variable_that_the_script_reads_and_starts_nothing(tmp_path: Path, script: str) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT.with_name(script)), "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []
    internal = {"BASH_SOURCE", "OMP_NUM_THREADS", "!name"}
    read = {part.split(":-")[0] for part in SCRIPT.read_text().split("${")[1:] if ":-" in part.split("}")[0]} - internal
    assert read >= {"MODEL_PATH", "NGPUS_PER_NODE", "LR"}
    assert not {name for name in read if name not in done.stdout}
