#!/usr/bin/env python
"""docs/support.md from the results of the tests.

    python -m pytest -m "not slow" --junitxml=outputs/tests.xml
    python scripts/make_support_table.py --results outputs/tests.xml            # writes docs/support.md
    python scripts/make_support_table.py --results outputs/tests.xml --check    # fails if that would change it

Only tests marked neither gpu nor slow count there, so that every machine makes the same table. The others count by
records beside the documents, each with the commit it was made on:

    python -m pytest -m slow --junitxml=outputs/slow.xml
    python scripts/make_support_table.py --record slow outputs/slow.xml     # gpu, two_gpus: --environment "H200, ..."

The options, and which tests prove each, are those of ``tests/options/table.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("VERL_PLATFORM", "cpu")  # the table imports verl, whose platform is chosen once
warnings.filterwarnings("ignore", message=".* engine is not available")

from tests.options.option import Case, Option  # noqa: E402
from tests.options.table import OPTIONS  # noqa: E402

TABLE = Path("docs/support.md")
RECORDS = {name: Path(f"docs/data/support_{name}.json") for name in ("gpu", "two_gpus", "slow")}
PYTEST, SCRIPT = "python -m pytest", "python scripts/make_support_table.py"
ON_GPUS = {"gpu": "1 GPU", "two_gpus": "2 GPUs"}
DEVICES = ("CPU", *ON_GPUS.values())
CARRIED = "a group larger than the token budget"
HEADER = """\
# Options that packed mode runs with

Made from the results of the tests by `scripts/make_support_table.py`; change `tests/options/table.py` instead.

- **exact**: on a CPU in float32, every log-prob, entropy, value and parameter's gradient is within 1e-5 of those of
  each sequence alone. On GPUs and in mixed precision: the error against float32 is at most 1.1 times that of stock
  rmpad.
- **rejected**: refused by name before anything is computed, with the override that lets the run start.
- **not run**: no test of it has passed on the machines that this table was made on.

`tests` counts those that run the option, alone and together with every option it meets in the code. `carried`: one of
them runs it with groups that exceed a micro-batch and hand on what they share.
"""


@dataclass(frozen=True)
class Results:
    """Tests that passed and prove an option.

    Attributes:
        options: names of options by test id, as the tests recorded them.
        environment: where the recorded tests ran.
        commit: what was checked out when they were recorded.
    """

    options: dict[str, list[str]] = field(default_factory=dict)
    environment: str = ""
    commit: str = ""

    @classmethod
    def from_junit(cls, path: Path) -> Results:
        """Read what ``pytest --junitxml`` wrote; ValueError where a test failed or there is none."""
        cases = list(ElementTree.parse(path).iter("testcase"))
        if not cases:
            raise ValueError(f"{path} holds no test")
        failed = [_id(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
        if failed:
            raise ValueError(f"{path}: {len(failed)} tests failed, the first of them {failed[0]}")
        passed = {_id(case): _options(case) for case in cases if case.find("skipped") is None}
        return cls({test: names for test, names in passed.items() if any(_proves(names, test))})

    @classmethod
    def from_record(cls, name: str, root: Path) -> Results:
        """Read a record, if there is one; ValueError where it names no commit or a test that no longer exists."""
        path = root / RECORDS[name]
        if not path.exists():
            return cls()
        results = cls(**json.loads(path.read_text()))
        try:
            if not results.commit:
                raise ValueError("it names no commit")
            return results.only(name, root)
        except ValueError as error:
            raise ValueError(f"{RECORDS[name]}: {error}\nrenew it: {renewal(name)}") from error

    def only(self, kind: str, root: Path) -> Results:
        """Those of one kind, in an order of their own."""
        tests = sorted(self.options.items())
        return replace(self, options={test: names for test, names in tests if kind_of(test, names, root) == kind})


def renewal(name: str) -> str:
    """The command that makes a record."""
    environment = "" if name == "slow" else ' --environment "GPU, kernels"'
    mark = "slow" if name == "slow" else "gpu"
    results = f"outputs/{name}.xml"
    return f"{PYTEST} -m {mark} --junitxml={results} && {SCRIPT} --record {name} {results}{environment}"


def commit_of(root: Path) -> str:
    """Short hash of what is checked out, ``-dirty`` if more than documents has changed since."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=root, text=True).strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def kind_of(test: str, names: list[str], root: Path) -> str:
    """``gpu``, ``two_gpus`` or ``slow``, as a test, its file or its case is marked or named; else ``quick``."""
    file, _, name = test.partition("::")
    source = (root / file).read_text() if (root / file).exists() else ""
    before, found, _ = source.partition(f"\ndef {name.partition('[')[0]}(")
    if not found:
        raise ValueError(f"the test {test} no longer exists")
    decorators = f"{before}\n".rpartition("\n\n\n")[2]  # as ruff formats: they follow two blank lines
    marks = decorators + source.partition("\npytestmark = ")[2].partition("\n\n")[0]
    if "pytest.mark.gpu" in marks:
        return "two_gpus" if "two_gpus" in file else "gpu"
    case = Case(tuple(option for option in OPTIONS if option.name in names))
    return "slow" if "pytest.mark.slow" in marks or case.slow else "quick"


def _id(case: ElementTree.Element) -> str:
    return f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"


def _options(case: ElementTree.Element) -> list[str]:
    return [p.attrib["value"] for p in case.iter("property") if p.attrib["name"] == "option"]


def _proves(names: list[str], test: str) -> Iterable[Option]:
    return (option for option in OPTIONS if option.name in names or test.startswith(option.proofs))


def _carries(test: str, names: list[str]) -> bool:
    """Whether a test runs chains, by the options that it names, its file or its case."""
    return CARRIED in names or "/test_carry" in test or "carried groups" in test


def merge(parts: Iterable[Results]) -> Results:
    """All tests that passed anywhere."""
    return Results({test: names for part in parts for test, names in part.options.items()})


def row(option: Option, results: Results, records: dict[str, Results]) -> str:
    """One line of the table."""
    on = {test: device for name, device in ON_GPUS.items() for test in records[name].options}
    proofs = [test for test, names in results.options.items() if option in _proves(names, test)]
    devices = {on.get(test, "CPU") for test in proofs}
    status = ("rejected" if option.rejected else "exact") if proofs else "not run"
    refused = f"refused with {', '.join(sorted(option.refuses))}" if option.refuses else ""
    note = "; ".join(filter(None, [option.note, refused]))
    override = f"`{option.override}`" if "=" in option.override else option.override
    marks = ["yes" if device in devices else "" for device in DEVICES]
    marks.append("yes" if any(_carries(test, results.options[test]) for test in proofs) else "")
    return f"| {' | '.join([option.name, override, status, str(len(proofs)), *marks, note])} |"


def described(name: str, record: Results) -> str:
    """Where one record was made, or how to make it."""
    if not record.commit:
        where = f"no run is recorded; make one with `{renewal(name)}`"
    else:
        where = ", ".join(filter(None, [record.environment, f"commit {record.commit}"]))
    return f"- {name.replace('_', ' ')} tests: {where}"


def render(quick: Results, records: dict[str, Results]) -> str:
    """The whole document."""
    results = merge([quick, *records.values()])
    columns = ["option", "override", "status", "tests", *DEVICES, "carried", "note"]
    lines = [f"| {' | '.join(columns)} |", "|---|---|---|--:|---|---|---|---|---|"]
    lines += [row(option, results, records) for option in sorted(OPTIONS, key=lambda option: option.rejected)]
    where = "\n".join(described(name, record) for name, record in records.items())
    return f"{HEADER}\n{where}\n\n" + "\n".join(lines) + "\n"


def keep(name: str, files: list[Path], environment: str, commit: str, root: Path) -> None:
    """Write a record, with no more of a machine than the given environment."""
    merged = merge(map(Results.from_junit, files))
    kept = replace(merged, environment=environment, commit=commit).only(name, root)
    if not kept.options:
        raise ValueError(f"no test in {', '.join(map(str, files))} is marked {name}, proves an option and passed")
    path = root / RECORDS[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(kept), indent=1, ensure_ascii=False) + "\n")


def make(files: list[Path], check: bool, root: Path) -> None:
    """Write the document or, to check it, raise ValueError if that would change it."""
    records = {name: Results.from_record(name, root) for name in RECORDS}
    document = render(merge(map(Results.from_junit, files)).only("quick", root), records)
    before = (root / TABLE).read_text() if (root / TABLE).exists() else ""
    if not check:
        (root / TABLE).write_text(document)
    elif document != before:
        changed = [line for line in document.splitlines() if line not in before.splitlines()]
        first = f"; the first line to change: {changed[0]}" if changed else ""
        raise ValueError(f"{TABLE} is stale{first}\nrenew it: {SCRIPT} --results {' '.join(map(str, files))}")


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 1 if the table is stale or cannot be made."""
    parser = argparse.ArgumentParser(description="docs/support.md from the results of the tests")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--results", type=Path, nargs="+", help="junit files of pytest, to make the table from")
    kinds = ", ".join(RECORDS)
    mode.add_argument("--record", nargs="+", metavar=("NAME", "JUNIT"), help=f"keep the proofs of one kind: {kinds}")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if docs/support.md is stale")
    parser.add_argument("--environment", default="", help="with --record: what they ran on")
    parser.add_argument("--commit", help="with --record: what was tested, where that is not what is checked out")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="checkout that holds docs and tests")
    options = parser.parse_args(arguments)
    try:
        if options.record:
            name, *files = options.record
            if name not in RECORDS or not files:
                parser.error(f"--record takes one of {', '.join(RECORDS)}, and junit files")
            commit = options.commit or commit_of(options.root)
            keep(name, [Path(file) for file in files], options.environment, commit, options.root)
        else:
            make(options.results, options.check, options.root)
    except (OSError, ValueError, ElementTree.ParseError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
