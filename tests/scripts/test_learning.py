"""Runs whose learning is compared differ in the mode alone, and every metric of theirs is drawn."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from learning_curves import METRICS, curve_of, run_of


def test_a_curve_is_read_from_the_metrics_of_verl_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = dict.fromkeys(METRICS.values(), 0.25) | {"training/global_step": 1, "timing_s/step": 2.0}
    path.write_text(json.dumps({"step": 1, "data": metrics}) + "\n")
    (step,) = curve_of(path, "packed", 7)
    assert (step.mode, step.seed, step.step, step.kl, step.dedup_ratio) == ("packed", 7, 1, 0.25, None)
    del metrics["actor/kl_loss"]
    path.write_text(json.dumps({"step": 1, "data": metrics}) + "\n")
    with pytest.raises(KeyError, match="actor/kl_loss"):
        curve_of(path, "packed", 7)


def test_both_modes_get_one_seed_one_optimizer_step_and_the_same_budget(tmp_path: Path) -> None:
    args = Namespace(output_dir=tmp_path, lr=3e-4, steps=60, overrides=["a.b=1"])
    ours, theirs = (run_of(mode, 7, args, "gpu").environment for mode in ("packed", "rmpad"))
    own = {"WORK_DIR", "VERL_FILE_LOGGER_PATH", "USE_PREFIX_GROUPER"}
    assert {key for key in ours if ours[key] != theirs[key]} <= own
    assert ours["TRAIN_BATCH_SIZE"] == ours["PPO_MINI_BATCH_SIZE"]
    command = run_of("packed", 7, args, "gpu").command
    assert {"data.seed=7", "actor_rollout_ref.rollout.seed=7"} <= set(command)
    assert command[-1] == "a.b=1"
