"""Curves of a training are drawn from what verl logged, each step once, or the script says what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from plot_training import draw, main, read_run, smoothed

REAL = Path(__file__).with_name("packed_run.jsonl")


def write(path: Path, *steps: tuple[int, dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in steps))
    return path


def test_every_value_of_a_real_run_is_read_at_its_step() -> None:
    run = read_run(REAL, "packed")
    lines = [json.loads(line) for line in REAL.read_text().splitlines()]
    assert set(run.metrics) == set().union(*(line["data"] for line in lines))
    for metric, points in run.metrics.items():
        assert points == [(line["step"], line["data"][metric]) for line in lines if metric in line["data"]]


def test_a_resumed_run_has_each_step_once_and_validation_keeps_its_steps(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl",
        (0, {"val/score": 0.1}),
        (1, {"loss": 3.0, "kind": "text", "bad": float("nan")}),
        (2, {"loss": 9.0}),
        (2, {"loss": 2.0, "val/score": 0.4}),
    )
    assert read_run(path, "").metrics == {"val/score": [(0, 0.1), (2, 0.4)], "loss": [(1, 3.0), (2, 2.0)]}


def test_a_line_that_is_still_being_written_is_left_out_and_one_in_the_middle_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", (1, {"loss": 3.0}))
    path.write_text(path.read_text() + '{"step": 2, "da')
    assert read_run(path, "").metrics == {"loss": [(1, 3.0)]}
    path.write_text(path.read_text() + '\n{"step": 3, "data": {"loss": 1.0}}\n')
    with pytest.raises(ValueError, match="line 2: no step of verl's file logger"):
        read_run(path, "")


def test_a_mean_looks_back_and_never_ahead() -> None:
    assert smoothed([1.0, 2.0, 6.0, 0.0], 3) == [1.0, 1.5, 3.0, pytest.approx(8 / 3)]
    assert smoothed([1.0, 2.0], 1) == [1.0, 2.0]


def test_the_picture_has_a_panel_for_each_metric_and_a_line_for_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write(tmp_path / "m.jsonl", (1, {"critic/score/mean": 0.5}), (2, {"critic/score/mean": 0.6, "val": 1.0}))
    runs, out = [read_run(REAL, "packed"), read_run(other, "rmpad")], tmp_path / "deep" / "curves.svg"
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    draw(runs, ["critic/score/mean", "timing_s/step", "val"], 2, out)
    drawn = out.read_text()
    for text in ("critic/score/mean", "timing_s/step", "val", "packed", "rmpad", "training step"):
        assert f">{text}</text>" in drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], 'trainer.logger=["console","file"]'),
        ([str(REAL), "--metrics", "critic/scores"], "no run logs critic/scores; --list names"),
    ],
)
def test_what_cannot_be_drawn_is_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plot_training.py", *arguments])
    assert main() == 1
    assert message in capsys.readouterr().err
