"""Write docs/options.md from the dataclass of the options, each with its default and the values it takes.

    python scripts/upkeep/make_options_page.py [--check]

With ``--check`` nothing is written; exit code 1 if the page is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import fields
from pathlib import Path

from verl_pg_plugin.config.options import PrefixGrouperOptions, option_issues

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
HEAD = """\
# Options

The section `prefix_grouper` of the config: `++prefix_grouper.NAME=VALUE` on any command line, and without `++` in
`python -m verl_pg_plugin.main_ppo`, whose config has the section. A value that an option does not take is refused
before Ray starts. Made from `config/options.py` by `scripts/upkeep/make_options_page.py`.

| option | default | takes | what it does |
|---|---|---|---|
"""


def descriptions() -> dict[str, str]:
    """What the docstring says of each option, on one line."""
    text = (PrefixGrouperOptions.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    entries = re.split(r"\n        (?=\w+: )", text.rstrip())[1:]
    pairs = (entry.partition(": ") for entry in entries)
    return {name: " ".join(rest.split()) for name, _, rest in pairs}


def taken_by(name: str) -> str:
    """The values that an option takes, as the error for a wrong one names them."""
    (issue,) = option_issues({name: object()})
    listed = issue.why.partition("the values are ")[2]
    return listed or issue.fix.partition("=")[2].replace("<", "").replace(">", "")


def page() -> str:
    """The whole page."""
    said = descriptions()
    rows = []
    for option in fields(PrefixGrouperOptions):
        text = said[option.name].replace("``ATTENTION_KERNELS``", "those listed").replace("``", "`")
        default = "null" if option.default is None else option.default
        rows.append(f"| `{option.name}` | `{default}` | {taken_by(option.name)} | {text} |\n")
    return HEAD + "".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        stale = not PAGE.is_file() or PAGE.read_text() != page()
        if stale:
            sys.stderr.write(f"{PAGE} is stale; run scripts/upkeep/make_options_page.py\n")
        return int(stale)
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
