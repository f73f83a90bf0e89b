"""An error on one rank ends the run of both, and not in a time-out, even where no rank can tell the others of it."""

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.options import run_fault
from tests.test_end_to_end import REPOSITORY

MOST_SECONDS = 30


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", run_fault.PLACES)
def test_an_error_in_one_worker_ends_the_run_on_both(tmp_path: Path, place: str) -> None:
    fault_time, log = tmp_path / "fault_time", tmp_path / "run.log"
    variables = {
        "WORK_DIR": str(tmp_path),
        "TOTAL_STEPS": "1",
        "NGPUS_PER_NODE": "2",
        "VERL_USE_EXTERNAL_MODULES": run_fault.__name__,
        "PYTHONPATH": str(REPOSITORY),
        "FAULT_TIME": str(fault_time),
        "FAULT_PLACE": place,
    }
    with log.open("w") as file:
        run = psutil.Popen(
            ["bash", "examples/run_qwen3_pg.sh"],
            cwd=REPOSITORY,
            env={**os.environ, **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        workers: dict[int, psutil.Process] = {}
        while run.poll() is None:
            workers.update((child.pid, child) for child in run.children(recursive=True))
            time.sleep(0.2)
        _, left = psutil.wait_procs(workers.values(), timeout=MOST_SECONDS)
    assert fault_time.exists(), log.read_text()[-3000:]
    assert time.time() - float(fault_time.read_text()) < MOST_SECONDS
    assert run.returncode != 0
    assert not left, "a worker outlived its run"
    assert f"ZeroDivisionError: {run_fault.FAULT}" in log.read_text()
