"""The pictures of the actor benchmark are drawn from what it measured, or refused when there is nothing to draw."""

import csv
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/plot_bench.py"
TURNS_SCRIPT = SCRIPT.with_name("plot_turns.py")


CASES = ("4096,1024,4,1", "8192,ln:1024,4,1", "8192,1024,8,2")
TURNS = ("agent:60,5,7,1,4,1", "agent:60,5,7,10,4,1", "tree:51,6,4,3,1")


def write_rows(path: Path, paths: tuple[str, ...], cases: tuple[str, ...] = CASES) -> None:
    fields = ("model", "kernel", "case", "path", "phase", "seconds_median", "seconds_min", "seconds_max", "speedup")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*fields, "flop_bound"))
        writer.writeheader()
        for case in cases:
            for phase in ("old_log_prob", "update_actor"):
                for name in paths:
                    numbers = (2.0, 1.9, 2.2, 2.5) if name == "packed" else (5.0, 4.9, 5.1, 1.0)
                    row = dict(zip(fields, ("tiny", "auto", case, name, phase, *numbers), strict=True))
                    writer.writerow(row | {"flop_bound": 3.0})


def test_both_pictures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    write_rows(tmp_path / "actor.csv", ("rmpad", "packed"), (*CASES, *TURNS))
    subprocess.run([sys.executable, SCRIPT, tmp_path / "actor.csv", "--out", tmp_path / "images"], check=True)
    for name in ("speedup_against_ratio", "speedup_against_n"):
        assert (tmp_path / "images" / f"{name}.png").stat().st_size > 10_000
        assert "update_actor" in (tmp_path / "images" / f"{name}.svg").read_text()


def test_agents_are_drawn_against_their_turns_with_what_others_published_as_text(tmp_path: Path) -> None:
    write_rows(tmp_path / "actor.csv", ("rmpad", "packed"), (*CASES, *TURNS))
    subprocess.run([sys.executable, TURNS_SCRIPT, tmp_path / "actor.csv", "--out", tmp_path], check=True)
    drawn = (tmp_path / "speedup_against_turns.svg").read_text()
    assert (tmp_path / "speedup_against_turns.png").stat().st_size > 10_000
    for text in ("turns of a session", "P=60 reply=5 tool=7 n=4", "8.31x", "arXiv:2511.00413"):
        assert text in drawn
    assert "P=4096" not in drawn


def test_one_number_of_turns_is_no_curve(tmp_path: Path) -> None:
    write_rows(tmp_path / "actor.csv", ("rmpad", "packed"), TURNS[1:])
    result = subprocess.run([sys.executable, TURNS_SCRIPT, tmp_path / "actor.csv"], capture_output=True, text=True)
    assert result.returncode
    assert "two values of turns of a session" in result.stderr


def test_a_file_without_packed_rows_is_refused_with_the_flag_that_makes_them(tmp_path: Path) -> None:
    write_rows(tmp_path / "actor.csv", ("rmpad",))
    result = subprocess.run([sys.executable, SCRIPT, tmp_path / "actor.csv"], capture_output=True, text=True)
    assert result.returncode
    assert "--paths rmpad packed" in result.stderr
