#!/usr/bin/env python
"""The outcome of every test of a run that is too long to repeat often, kept in a csv with its commit and versions.

    python -m pytest -m slow tests/modalities --junitxml=outputs/slow.xml
    python scripts/upkeep/record_outcomes.py docs/data/slow_tests_models.csv outputs/slow.xml

A test that ran before with the same versions is replaced; skipped ones are left out.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[2]
COLUMNS = ("test", "outcome", "seconds", "commit", "versions")
PACKAGES = ("torch", "transformers", "verl")


def outcomes(path: Path) -> list[dict[str, str]]:
    """Test, outcome and seconds of every test that ran."""
    found = []
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is None:
            failed = case.find("failure") is not None or case.find("error") is not None
            test = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            seconds = f"{float(case.attrib['time']):.0f}"
            found.append({"test": test, "outcome": "failed" if failed else "passed", "seconds": seconds})
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="keep the outcomes of long tests in a csv")
    parser.add_argument("record", type=Path, help="csv to write")
    parser.add_argument("results", type=Path, nargs="+", help="junit files of pytest")
    parser.add_argument("--commit", help="what was tested; default what is checked out")
    parser.add_argument("--versions", help="what it was tested with; default what is installed")
    options = parser.parse_args(arguments)
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.check_output(head, cwd=REPOSITORY, text=True).strip()
    versions = options.versions or ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    if options.record.exists():
        with options.record.open(newline="") as lines:
            rows = {(row["test"], row["versions"]): row for row in csv.DictReader(lines)}
    for path in options.results:
        for outcome in outcomes(path):
            rows[outcome["test"], versions] = {**outcome, "commit": commit, "versions": versions}
    with options.record.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
