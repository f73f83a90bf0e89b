"""Scripts that no other test runs still find what they import, and the cost model still ranks what was measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(*command: str) -> str:
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize(
    "script",
    [
        "bench_balance.py",
        "bench_chains.py",
        "bench_layout.py",
        "bench_actor.py",
        "bench_longest_prompt.py",
        "upkeep/draw_chain.py",
    ],
)
def test_script_explains_itself(script: str) -> None:
    assert "usage:" in run(str(SCRIPTS / script), "--help")


def test_the_cost_model_ranks_the_measured_cases() -> None:
    ranks = re.findall(r"(?:old_log_prob|update_actor) │ \d+ +│ (0\.\d+)", run(str(SCRIPTS / "cost_accuracy.py")))
    assert len(ranks) == 4
    assert min(map(float, ranks)) > 0.9
