"""A record of long tests says what failed, and a run replaces what it ran again."""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "upkeep"))
from record_outcomes import main


def case(name: str, inside: str = "") -> str:
    return f'<testcase classname="tests.a.test_b" name="{name}" time="1.6">{inside}</testcase>'


def record(folder: Path, *cases: str, **options: str) -> list[dict[str, str]]:
    results, kept = folder / "results.xml", folder / "kept.csv"
    results.write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    chosen = {"commit": "abc", "versions": "torch 1", **options}
    assert main([str(kept), str(results), *(f"--{name}={value}" for name, value in chosen.items())]) == 0
    with kept.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_failures_are_kept_and_skipped_tests_are_not(tmp_path: Path) -> None:
    rows = record(tmp_path, case("x"), case("y", "<failure/>"), case("z", "<skipped/>"))
    assert [(row["test"], row["outcome"]) for row in rows] == [
        ("tests/a/test_b.py::x", "passed"),
        ("tests/a/test_b.py::y", "failed"),
    ]
    assert {(row["seconds"], row["commit"], row["versions"]) for row in rows} == {("2", "abc", "torch 1")}


def test_a_second_run_replaces_what_it_ran_with_the_same_versions(tmp_path: Path) -> None:
    record(tmp_path, case("x", "<failure/>"), case("y"))
    record(tmp_path, case("x"), versions="torch 2")
    rows = record(tmp_path, case("x"), commit="def")
    assert [(row["test"][-1], row["outcome"], row["commit"], row["versions"]) for row in rows] == [
        ("x", "passed", "def", "torch 1"),
        ("x", "passed", "abc", "torch 2"),
        ("y", "passed", "abc", "torch 1"),
    ]
