"""Learning curves are compared with the band of the rmpad runs as the text beside the picture says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.common import write_csv
from learning_curves import METRICS, LearningRun, LearningStep, curve_of
from plot_learning import TITLES, compare, read_curves, steps_together

SCRIPTS = Path(__file__).parents[2] / "scripts"


def write_runs(path: Path, runs: dict[tuple[str, int], list[float]]) -> None:
    """Every metric of a step has the same value."""
    rows = [
        LearningStep(mode, seed, step, *[value] * 7, dedup_ratio=None, step_s=1.0)
        for (mode, seed), curve in runs.items()
        for step, value in enumerate(curve, start=1)
    ]
    write_csv(rows, path)


THREE_STOCK_RUNS = {
    ("rmpad", 1): [0.1, 0.5, 0.5],
    ("rmpad", 2): [0.3, 0.3, 0.9],
    ("rmpad", 3): [0.2, 0.4, 0.7],
}


def test_values_outside_the_band_are_counted_and_pairs_of_a_seed_are_held_together(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    write_runs(path, {**THREE_STOCK_RUNS, ("packed", 1): [0.1, 0.51, 0.4], ("packed", 2): [0.3, 0.3, 0.9]})
    curves = read_curves(path, "reward")
    result = compare("reward", curves)
    assert (result.outside, result.mean_outside) == (2, 0)
    assert (result.steps, result.runs) == (3, 2)
    assert result.apart == pytest.approx(0.1)
    assert result.band == ([0.1, 0.3, 0.5], [0.3, 0.5, 0.9])
    assert [steps_together(curves, seed) for seed in (1, 2)] == [1, 3]


def test_rounding_is_not_outside_and_more_than_rounding_is(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    for excess, outside in ((1e-6, 0), (1e-4, 3)):
        write_runs(path, {**THREE_STOCK_RUNS, ("packed", 4): [0.3 + excess, 0.3 - excess, 0.9 + excess]})
        result = compare("reward", read_curves(path, "reward"))
        assert result.outside == outside
        assert result.apart is None


def test_the_picture_and_the_table_have_every_metric(tmp_path: Path) -> None:
    write_runs(tmp_path / "curves.csv", {**THREE_STOCK_RUNS, ("packed", 1): [0.1, 0.5, 0.5]})
    command = [sys.executable, SCRIPTS / "plot_learning.py", tmp_path / "curves.csv", "--out", tmp_path / "out.png"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert all(metric in done.stdout for metric in TITLES)
    assert "seed 1: the same rewards in both modes up to step 3" in done.stdout


@pytest.mark.parametrize(
    ("runs", "message"),
    [({("rmpad", 1): [0.1]}, "no packed run"), ({("rmpad", 1): [0.1], ("packed", 1): []}, "no packed run")],
)
def test_curves_without_a_mode_are_refused(
    tmp_path: Path, runs: dict[tuple[str, int], list[float]], message: str
) -> None:
    write_runs(tmp_path / "curves.csv", runs)
    with pytest.raises(ValueError, match=message):
        read_curves(tmp_path / "curves.csv", "reward")


def test_a_curve_with_a_hole_is_refused(tmp_path: Path) -> None:
    write_runs(tmp_path / "curves.csv", {**THREE_STOCK_RUNS, ("packed", 1): [0.1, 0.2, 0.3]})
    lines = (tmp_path / "curves.csv").read_text().splitlines(keepends=True)
    (tmp_path / "curves.csv").write_text("".join(line for line in lines if not line.startswith("packed,1,2,")))
    with pytest.raises(ValueError, match="packed, seed 1, lacks step 2"):
        read_curves(tmp_path / "curves.csv", "reward")


@pytest.fixture
def run(tmp_path: Path) -> LearningRun:
    return LearningRun("packed", 7, 60, "gpu", 3e-4, tmp_path / "model", tmp_path / "data", tmp_path, ("a.b=1",))


def test_a_curve_is_read_from_the_metrics_of_verl_and_a_missing_one_is_an_error(run: LearningRun) -> None:
    metrics = dict.fromkeys(METRICS.values(), 0.25) | {"training/global_step": 1}
    run.metrics.write_text(json.dumps({"step": 1, "data": metrics}) + "\n")
    (step,) = curve_of(run)
    assert (step.mode, step.seed, step.step, step.kl, step.dedup_ratio) == ("packed", 7, 1, 0.25, None)
    del metrics["actor/kl_loss"]
    run.metrics.write_text(json.dumps({"step": 1, "data": metrics}) + "\n")
    with pytest.raises(KeyError, match="actor/kl_loss"):
        curve_of(run)


def test_both_modes_get_one_seed_one_optimizer_step_and_the_same_budget(run: LearningRun) -> None:
    stock = LearningRun("rmpad", *[getattr(run, name) for name in list(run.__dataclass_fields__)[1:]])
    ours, theirs = run.environment(), stock.environment()
    assert {key for key in ours if ours[key] != theirs[key]} == {"USE_PREFIX_GROUPER"}
    assert ours["TRAIN_BATCH_SIZE"] == ours["PPO_MINI_BATCH_SIZE"]
    assert {"data.seed=7", "actor_rollout_ref.rollout.seed=7"} <= set(run.command())
    assert run.command()[-1] == "a.b=1"


def test_figures_of_a_run_with_other_settings_are_not_taken_for_this_one(run: LearningRun) -> None:
    assert not run.was_run_otherwise()
    run.keep_settings()
    assert not run.was_run_otherwise()
    assert replace(run, lr=run.lr / 2).was_run_otherwise()
    assert replace(run, overrides=("actor_rollout_ref.actor.entropy_coeff=5",)).was_run_otherwise()
