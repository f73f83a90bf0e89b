"""On GPUs the run script saves, validates and resumes as verl's examples do; a variable changes each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.test_run_script import run_script


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
def test_fifteen_epochs_on_gpus_are_not_lost(tmp_path: Path, variables: dict[str, str], expected: list[str]) -> None:
    python, data = tmp_path / "python", tmp_path / "data.parquet"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    data.write_text("")
    files = {"MODEL_PATH": str(tmp_path), "TRAIN_FILES": str(data), "VAL_FILES": str(data), "PYTHON": str(python)}
    runs = [run_script(tmp_path, **files, **variables) for _ in range(2)]
    assert all(done.returncode == 0 for done in runs), runs[0].stderr
    said = [done.stdout.splitlines() for done in runs]
    assert all(override in arguments for override in expected for arguments in said)
    folders = [next(a for a in arguments if a.startswith("trainer.default_local_dir=")) for arguments in said]
    assert (folders[0] == folders[1]) == ("DEVICE" not in variables), (
        "where a run resumes from stays; a trial's is its own"
    )
