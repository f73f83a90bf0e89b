#!/usr/bin/env python
"""Write docs/support.md: options of ``tests/options/table.py``, where their tests passed, and verl's example scripts.

    python scripts/make_support_table.py
    python -m pytest -m gpu tests/options --junitxml=outputs/gpu.xml
    python scripts/make_support_table.py --record "1 GPU" outputs/gpu.xml --where "one H200, commit abc1234"

``--record`` keeps in docs/data/support.json which options the tests of a device ran, in place of what it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VERL_PLATFORM", "cpu")  # the table imports verl, whose platform is chosen once
warnings.filterwarnings("ignore", message=".* engine is not available")

from tests.options.option import Option  # noqa: E402
from tests.options.table import OPTIONS  # noqa: E402

PAGE, RECORD = ROOT / "docs/support.md", ROOT / "docs/data/support.json"
EXAMPLES = ROOT / "tests/config/verl_examples.yaml"
EXAMPLES_HEADER = """
## verl's own example scripts

Those of verl's `examples/` that train with FSDP, with `actor_rollout_ref.actor.use_prefix_grouper=True` added and
nothing else: what is found before Ray starts, on a tiny checkpoint of the model type
(`tests/config/test_verl_examples.py`). Behind a refusal is what lets the script run.

| script | model type | with the flag |
|---|---|---|
"""
DEVICES = ("CPU", "1 GPU", "2 GPUs")
HEADER = """\
# Options that packed mode runs with

Made from `tests/options/table.py` and the results of the tests by `scripts/make_support_table.py`.

- **exact**: on a CPU in float32, every log-prob, entropy, value and parameter's gradient is within 1e-5 of those of
  each sequence alone. On GPUs and in mixed precision: the error against float32 is at most 1.1 times that of stock
  rmpad.
- **rejected**: refused by name before anything is computed, with the override that lets the run start.

Where the tests of an option passed:

"""


def options_of(path: Path) -> list[str]:
    """Options that the tests of a junit file ran or prove.

    Raises:
        ValueError: a test failed, or none ran an option.
    """
    found = set()
    for case in ElementTree.parse(path).iter("testcase"):
        test = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        if case.find("failure") is not None or case.find("error") is not None:
            raise ValueError(f"{path}: {test} failed")
        if case.find("skipped") is None:
            named = {item.attrib["value"] for item in case.iter("property") if item.attrib["name"] == "option"}
            found |= {option.name for option in OPTIONS if option.name in named or test.startswith(option.proofs)}
    if not found:
        raise ValueError(f"{path}: no test of an option passed")
    return sorted(found)


def line(option: Option, record: dict[str, dict[str, Any]]) -> str:
    """A row of the table."""
    refused = f"refused with {', '.join(sorted(option.refuses))}" if option.refuses else ""
    override = re.sub(r"(?<![+\w])prefix_grouper\.", "++prefix_grouper.", option.override)
    override = f"`{override}`" if "=" in override else override
    marks = ["yes" if option.name in record[device]["options"] else "" for device in DEVICES]
    status, note = "rejected" if option.rejected else "exact", "; ".join(filter(None, [option.note, refused]))
    return f"| {' | '.join([option.name, override, status, *marks, note])} |\n"


def examples_table() -> str:
    """The section about verl's example scripts, from the data of their test."""
    rows = []
    for name, script in yaml.safe_load(EXAMPLES.read_text())["scripts"].items():
        outcome = f"refused: {script['refused']}; `{script['way']}`" if "refused" in script else "runs"
        outcome += f"; {script['note']}" if "note" in script else ""
        rows.append(f"| `{name}_fsdp.sh` | {script['model']} | {outcome} |\n")
    return EXAMPLES_HEADER + "".join(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs=2, metavar=("DEVICE", "JUNIT"), help=f"DEVICE: {', '.join(DEVICES)}")
    parser.add_argument("--where", help="with --record: machine, versions and commit")
    args = parser.parse_args(arguments)
    record = json.loads(RECORD.read_text())
    if args.record:
        device, junit = args.record
        if device not in DEVICES or not args.where:
            parser.error(f"--record takes one of {', '.join(DEVICES)}, and --where")
        record[device] = {"where": args.where, "options": options_of(Path(junit))}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    where = "".join(f"- {device}: {record[device]['where'].partition(', commit')[0]}\n" for device in DEVICES)
    head = f"\n| {' | '.join(['option', 'override', 'status', *DEVICES, 'note'])} |\n|---|---|---|---|---|---|---|\n"
    rows = "".join(line(option, record) for option in sorted(OPTIONS, key=lambda option: option.rejected))
    PAGE.write_text(HEADER + where + head + rows + examples_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
