"""Record packed mode's support of each model type of the installed transformers, and update docs/models.md.

    python scripts/make_models_table.py

docs/data/models.json has a record for each version of transformers: run this under the lowest and the highest supported
version and that of ``constraints.txt``. ``tests/architectures`` and ``tests/mixers`` fail if they differ from the
record. Types that this version's record does not call exact are tested here; if their tests do not pass, they are
recorded as not run.
"""

import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE, RECORD = REPOSITORY / "docs/models.md", REPOSITORY / "docs/data/models.json"
TESTS = [
    REPOSITORY / "tests/architectures/test_every_model.py",
    *(REPOSITORY / f"tests/mixers/test_{mixer}.py" for mixer in ("gated_delta", "mamba2")),
]
COLUMNS = ("head_in_chunks", "fused_kernels", "value_head", "compiled")


def read_record() -> dict[str, dict[str, Any]]:
    """Return outcomes by version of transformers, the lowest first, and model type."""
    record = json.loads(RECORD.read_text())
    return dict(sorted(record.items(), key=lambda item: tuple(map(int, item[0].split(".")))))


def page(record: dict[str, dict[str, Any]]) -> str:
    """Return the page with the record's rows and numbers; other text is kept."""
    newest = list(record)[-1]
    latest = {name: (version, outcome) for version, outcomes in record.items() for name, outcome in outcomes.items()}
    every_kernel = {kernel for _, outcome in latest.values() for kernel in outcome["kernels"]}
    rows: dict[str, list[str]] = {"exact": [], "refused": [], "not run": []}
    for model_type, (version, outcome) in sorted(latest.items()):
        cells = [f"{model_type}{_versions(model_type, version, newest, record)}"]
        if outcome["status"] == "exact":
            cells += ["yes" if outcome[column] else "no" for column in COLUMNS]
            cells.append("all" if set(outcome["kernels"]) == every_kernel else ", ".join(outcome["kernels"]))
            cells.append(", ".join(f"`{need}`" for need in outcome["needs"]))
        else:
            cells.append(outcome["why"])
        rows[outcome["status"]].append(f"| {' | '.join(cells)} |\n")
    text = PAGE.read_text()
    versions = ", ".join(f"{len(outcomes)} in {version}" for version, outcomes in record.items())
    text = re.sub(r"(?<=causal language model for: ).*(?=\. The)", versions, text)
    for status, lines in rows.items():
        # "**75 are exact**", and the rows of the next table.
        table = rf"\*\*\d+ are {status}(\*\*.*?\n\|[-|]+\|\n)(?:\|[^\n]*\n)*"
        text = re.sub(
            table, lambda of, s=status, at=lines: f"**{len(at)} are {s}{of[1]}{''.join(at)}", text, flags=re.DOTALL
        )
    return text


def _versions(model_type: str, version: str, newest: str, record: dict[str, dict[str, Any]]) -> str:
    """Return a note on the versions in which a type differs."""
    if version != newest:
        return f" (up to {version})"
    by_version = {other: outcomes.get(model_type) for other, outcomes in record.items()}
    latest = by_version[newest]
    notes = [latest["why"]] if latest["status"] == "exact" and latest["why"] else []
    for other, outcome in by_version.items():
        if outcome is None:
            notes.append(f"not in {other}")
        elif outcome["status"] != latest["status"]:
            notes.append(f"{other}: {outcome['status']}")
    return f" ({', '.join(notes)})" if notes else ""


class Recorder:
    """pytest plugin that collects outcomes by test parameter."""

    def __init__(self) -> None:
        self.outcomes: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.outcomes.setdefault(report.nodeid.partition("[")[2].rstrip("]"), set()).add(report.outcome)


def passing(model_types: set[str], tests: Sequence[Path] = TESTS) -> set[str]:
    """Run the tests of types; return those that have tests and pass all."""
    recorder = Recorder()
    if model_types:
        names = " or ".join(f"[{name}]" for name in sorted(model_types))
        pytest.main(["-m", "not slow", "-k", names, *map(str, tests)], [recorder])
    return {name for name in model_types if recorder.outcomes.get(name) == {"passed"}}


def main() -> None:
    sys.path.insert(0, str(REPOSITORY))
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    warnings.filterwarnings("ignore", message=".* engine is not available")
    import transformers

    from tests.architectures.outcome import outcome_of
    from tests.architectures.tiny_configs import MODEL_TYPES

    record = read_record()
    known = record.get(transformers.__version__, {})
    outcomes = {model_type: dict(vars(outcome_of(model_type))) for model_type in MODEL_TYPES}
    new = {
        name for name, outcome in outcomes.items() if outcome["status"] == "exact" != known.get(name, {}).get("status")
    }
    for name in new - passing(new):
        outcomes[name] |= {"status": "not run", "why": "untested: its tests have not passed"}
    record[transformers.__version__] = outcomes
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(read_record()))


if __name__ == "__main__":
    main()
