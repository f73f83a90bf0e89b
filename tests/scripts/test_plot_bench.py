"""The pictures of the actor benchmark are drawn from what it measured, or refused when there is nothing to draw."""

import csv
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/plot_bench.py"


def write_rows(path: Path, paths: tuple[str, ...]) -> None:
    fields = ("model", "kernel", "case", "path", "phase", "seconds_median", "seconds_min", "seconds_max", "speedup")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*fields, "flop_bound"))
        writer.writeheader()
        for case in ("4096,1024,4,1", "8192,ln:1024,4,1", "8192,1024,8,2"):
            for phase in ("old_log_prob", "update_actor"):
                for name in paths:
                    numbers = (2.0, 1.9, 2.2, 2.5) if name == "packed" else (5.0, 4.9, 5.1, 1.0)
                    row = dict(zip(fields, ("tiny", "auto", case, name, phase, *numbers), strict=True))
                    writer.writerow(row | {"flop_bound": 3.0})


def test_both_pictures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    write_rows(tmp_path / "actor.csv", ("rmpad", "packed"))
    subprocess.run([sys.executable, SCRIPT, tmp_path / "actor.csv", "--out", tmp_path / "images"], check=True)
    for name in ("speedup_against_ratio", "speedup_against_n"):
        assert (tmp_path / "images" / f"{name}.png").stat().st_size > 10_000
        assert "update_actor" in (tmp_path / "images" / f"{name}.svg").read_text()


def test_a_file_without_packed_rows_is_refused_with_the_flag_that_makes_them(tmp_path: Path) -> None:
    write_rows(tmp_path / "actor.csv", ("rmpad",))
    result = subprocess.run([sys.executable, SCRIPT, tmp_path / "actor.csv"], capture_output=True, text=True)
    assert result.returncode
    assert "--paths rmpad packed" in result.stderr
