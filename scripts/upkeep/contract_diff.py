"""Print the parts of verl, transformers and torch that look otherwise than when our code was written, as a diff.

    python scripts/upkeep/contract_diff.py

Exit code 0 if nothing differs, 1 otherwise. Unlike the doctor it does not mind versions outside the declared range.
"""

from __future__ import annotations

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl is imported: its platform is chosen once

import pkgutil
import sys
from importlib.metadata import version

from verl_pg_plugin.contract.table import Part, differences, signature_of
from verl_pg_plugin.contract.verl import PARTS


def lines_of(part: Part) -> list[str]:
    """A part that differs: what we know, what is there, and who uses it."""
    try:
        there = f"+{part.path}{signature_of(pkgutil.resolve_name(part.path))}"
    except (AttributeError, ImportError) as error:
        there = f"+{part.path} is gone ({error})"
    return [f"@@ {', '.join(part.used_by)} @@", f"-{part.path}{part.signature}", there]


def main() -> int:
    changed = [part for part in PARTS if differences([part])]
    here = ", ".join(f"{name} {version(name)}" for name in ("verl", "transformers", "torch"))
    sys.stdout.write(f"{len(changed)} of {len(PARTS)} parts differ: {here}\n")
    if changed:
        lines = ["```diff", *(line for part in changed for line in lines_of(part)), "```"]
        sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
