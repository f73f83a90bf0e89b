#!/usr/bin/env python
"""docs/support.md from the results of the tests.

    python -m pytest -m "not slow" --junitxml=outputs/tests.xml
    python scripts/make_support_table.py --results outputs/tests.xml            # writes docs/support.md
    python scripts/make_support_table.py --results outputs/tests.xml --check    # fails if that would change it

Tests that such a run leaves out are recorded beside the documents, after a run of their own:

    python -m pytest -m slow --junitxml=outputs/slow.xml
    python scripts/make_support_table.py --record slow outputs/slow.xml
    python -m pytest -m gpu --junitxml=outputs/gpu.xml
    python scripts/make_support_table.py --record gpu outputs/gpu.xml --environment "NVIDIA H200, flash-attn 2.8"

The options, and which tests prove each, are those of ``tests/options/table.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("VERL_PLATFORM", "cpu")  # the table imports verl, whose platform is chosen once
warnings.filterwarnings("ignore", message=".* engine is not available")

from tests.options.option import Option  # noqa: E402
from tests.options.table import OPTIONS  # noqa: E402

TABLE = Path("docs/support.md")
RECORDS = {name: Path(f"docs/data/support_{name}.json") for name in ("gpu", "slow")}
DEVICES = ("CPU", "1 GPU", "2 GPUs")
HEADER = """\
# Options that packed mode runs with

Made from the results of the tests by `scripts/make_support_table.py`; change `tests/options/table.py` instead.

- **exact**: on a CPU in float32, every log-prob, entropy, value and parameter's gradient is within 1e-5 of those of
  each sequence alone. On GPUs and in mixed precision: the error against float32 is at most 1.1 times that of stock
  rmpad.
- **rejected**: refused by name before anything is computed, with the override that lets the run start.
- **not run**: no test of it has passed on the machines that this table was made on.

`tests` counts those that run the option, alone and together with every option it meets in the code.
"""


NO_GPU = """\
No run on GPUs is recorded here yet, since none was green as a whole. The last, on two H200s, passed 82 tests and failed
190: in 186 of them Liger had replaced the classes of the float32 reference in the same process. Such cases have
processes of their own since, and were not run again. [Outcomes](data/gpu_tests_754f661.csv).
"""


@dataclass(frozen=True)
class Results:
    """Tests that passed.

    Attributes:
        options: names of options by test id, as the tests recorded them.
        environment: where the recorded tests ran.
    """

    options: dict[str, list[str]] = field(default_factory=dict)
    environment: str = ""

    @classmethod
    def from_junit(cls, path: Path) -> Results:
        """Read what ``pytest --junitxml`` wrote.

        Raises:
            ValueError: a test failed, or the file holds no test.
        """
        cases = list(ElementTree.parse(path).iter("testcase"))
        if not cases:
            raise ValueError(f"{path} holds no test")
        failed = [_id(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
        if failed:
            raise ValueError(f"{path}: {len(failed)} tests failed, the first of them {failed[0]}")
        return cls({_id(case): _options(case) for case in cases if case.find("skipped") is None})

    @classmethod
    def from_record(cls, path: Path) -> Results:
        """Read what ``save`` wrote; nothing where there is no such file."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def save(self, path: Path) -> None:
        """Write the tests that prove an option, and no more of a machine than the given environment."""
        proofs = {test: names for test, names in sorted(self.options.items()) if any(_proves(self, test))}
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"environment": self.environment, "options": proofs}
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _id(case: ElementTree.Element) -> str:
    return f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"


def _options(case: ElementTree.Element) -> list[str]:
    return [p.attrib["value"] for p in case.iter("property") if p.attrib["name"] == "option"]


def _proves(results: Results, test: str) -> Iterable[Option]:
    return (option for option in OPTIONS if option.name in results.options[test] or test.startswith(option.proofs))


def merge(parts: Iterable[Results]) -> Results:
    """All tests that passed anywhere."""
    return Results({test: names for part in parts for test, names in part.options.items()})


def device_of(test: str) -> str:
    """The column of a test."""
    file = test.partition("::")[0].rpartition("/")[2]
    return "2 GPUs" if "two_gpus" in file else "1 GPU" if "gpu" in file else "CPU"


def row(option: Option, results: Results) -> str:
    """One line of the table."""
    proofs = [test for test in results.options if option in _proves(results, test)]
    devices = {device_of(test) for test in proofs}
    status = ("rejected" if option.rejected else "exact") if proofs else "not run"
    refused = f"refused with {', '.join(sorted(option.refuses))}" if option.refuses else ""
    note = "; ".join(filter(None, [option.note, refused]))
    override = f"`{option.override}`" if "=" in option.override else option.override
    marks = ["yes" if device in devices else "" for device in DEVICES]
    return f"| {' | '.join([option.name, override, status, str(len(proofs)), *marks, note])} |"


def render(results: Results, environment: str) -> str:
    """The whole document."""
    columns = ["option", "override", "status", "tests", *DEVICES, "note"]
    lines = [f"| {' | '.join(columns)} |", "|---|---|---|--:|---|---|---|---|"]
    lines += [row(option, results) for option in sorted(OPTIONS, key=lambda option: option.rejected)]
    where = f"GPU results: {environment}.\n" if environment else NO_GPU
    return f"{HEADER}\n{where}\n" + "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 1 if the table is stale or cannot be made."""
    parser = argparse.ArgumentParser(description="docs/support.md from the results of the tests")
    parser.add_argument("--results", type=Path, nargs="+", help="junit files of pytest, to make the table from")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if docs/support.md is stale")
    parser.add_argument(
        "--record", nargs="+", metavar=("NAME", "JUNIT"), help="keep results under docs/data: gpu, slow"
    )
    parser.add_argument("--environment", default="", help="with --record: what they ran on")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="folder that holds docs")
    options = parser.parse_args(arguments)
    try:
        if options.record:
            name, *files = options.record
            if name not in RECORDS or not files:
                parser.error(f"--record takes one of {', '.join(RECORDS)}, and junit files")
            merged = merge(Results.from_junit(Path(file)) for file in files)
            Results(merged.options, options.environment).save(options.root / RECORDS[name])
            return 0
        if not options.results:
            parser.error("give --results or --record")
        records = {name: Results.from_record(options.root / path) for name, path in RECORDS.items()}
        results = merge([*records.values(), *map(Results.from_junit, options.results)])
    except (OSError, ValueError, ElementTree.ParseError) as error:
        return fail(f"{error}; the table is made from a complete run without failures")
    document = render(results, records["gpu"].environment)
    path = options.root / TABLE
    if not options.check:
        path.write_text(document)
        return 0
    before = path.read_text().splitlines() if path.exists() else []
    changed = [line for line in document.splitlines() if line not in before]
    if document.splitlines() == before:
        return 0
    first = f"; the first line to change: {changed[0]}" if changed else ""
    files = " ".join(map(str, options.results))
    return fail(f"{TABLE} is stale{first}\nrenew it: python scripts/make_support_table.py --results {files}")


def fail(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
