"""The picture of whole steps shows every second of a run, or the script says what is missing."""

import csv
from pathlib import Path

import pytest
from plot_steps import draw, read_bars

DATA = Path(__file__).parents[2] / "docs/data/step_4b.csv"


def rows() -> list[dict[str, str]]:
    with DATA.open(newline="") as file:
        return list(csv.DictReader(file))


def test_phases_and_the_rest_add_up_to_the_step_that_was_measured(tmp_path: Path) -> None:
    bars = read_bars(rows())
    steps = {(row["case"], row["mode"]): float(row["seconds_median"]) for row in rows() if row["phase"] == "step"}
    assert {(bar.case, bar.mode) for bar in bars} == set(steps)
    for bar in bars:
        assert sum(bar.seconds.values()) + bar.other == pytest.approx(steps[bar.case, bar.mode])
        assert 0 <= bar.other < 0.05 * bar.step, "a phase of the step is not in the picture"
    draw(bars, "steps", tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 10_000


def test_a_run_without_its_whole_step_is_refused_by_name() -> None:
    without = [row for row in rows() if (row["mode"], row["phase"]) != ("packed", "step")]
    with pytest.raises(ValueError, match=r"4096,1024,4,8 packed: no row of the whole step"):
        read_bars(without)
