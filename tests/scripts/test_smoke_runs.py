"""What users do with the example scripts passes on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "smoke_runs.py"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_tools_kill_and_resume_adapters_and_critic_run_two_steps_each(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--runs", "tools", "lora", "critic", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    results = [line.split() for line in done.stdout.splitlines() if " ok " in line]
    assert [(line[0], line[3]) for line in results] == [("tools", "ok"), ("lora", "ok"), ("critic", "ok")]
