"""The benchmark runs, and compares the same numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_padding.py"


@pytest.mark.slow
def test_padded_and_packed_have_the_same_loss_and_gradient_norm() -> None:
    run = [sys.executable, str(SCRIPT), "--seqlen", "32", "--repeats", "1"]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    rows = [line.split("│") for line in done.stdout.splitlines() if "padded" in line or "packed" in line][-2:]
    padded, packed = ([float(cell) for cell in row[-3:-1]] for row in rows)
    assert padded == pytest.approx(packed, rel=1e-5)
