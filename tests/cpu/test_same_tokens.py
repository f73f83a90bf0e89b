"""The same seed draws the same responses in the mode that shares prefixes and in the one that does not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def train(folder: Path, script: str) -> list[list[tuple[str, str, float]]]:
    """Five float32 steps; the (prompt, response, reward) of every sequence of each step, sorted."""
    environment = {
        "WORK_DIR": str(folder),
        "TOTAL_STEPS": "5",
        "TRAIN_BATCH_SIZE": "4",
        # One optimizer step a training step: the modes balance differently, and would fill mini-batches differently.
        "PPO_MINI_BATCH_SIZE": "4",
        "MAX_TOKEN_LEN": "2048",
    }
    command = ["bash", f"examples/{script}", f"trainer.rollout_data_dir={folder}/rollouts"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = []
    for step in range(1, 6):
        lines = (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        sequences = [json.loads(line) for line in lines]
        steps.append(sorted((one["input"], one["output"], one["score"]) for one in sequences))
    return steps


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_one_seed_samples_the_same_tokens_in_rmpad_and_packed_mode_for_five_steps(tmp_path: Path) -> None:
    rmpad = train(tmp_path / "rmpad", "run_qwen3_rmpad.sh")
    packed = train(tmp_path / "packed", "run_qwen3_pg.sh")
    assert [len(step) for step in rmpad] == [32] * 5
    for number, (ours, stock) in enumerate(zip(packed, rmpad, strict=True), start=1):
        assert ours == stock, f"step {number}"
    assert len({response for _, response, _ in rmpad[0]}) > 4, "greedy or constant responses would prove nothing"
