"""Write docs/options.md and the options in the Hydra file from their dataclass: defaults, values, what they do.

    python scripts/upkeep/make_options_page.py [--check]

With ``--check`` nothing is written; exit code 1 if one of the two is stale.
"""

import argparse
import re
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

from verl_pg_plugin.config.options import PrefixGrouperOptions, option_issues

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "options.md"
HYDRA = REPOSITORY / "verl_pg_plugin" / "config" / "hydra" / "prefix_grouper" / "options.yaml"
VALUES = {None: "null", "off": '"off"'}
"""How YAML writes a default: a bare off is False."""
HEAD = """\
# Options

The section `prefix_grouper` of the config: `++prefix_grouper.NAME=VALUE` on the command line of any RL run, and without
`++` in `python -m verl_pg_plugin.main_ppo`, whose config has the section. A value that an option does not take is
refused before Ray starts. Made from `config/options.py` by `scripts/upkeep/make_options_page.py`.

| option | default | takes | what it does |
|---|---|---|---|
"""


def descriptions() -> dict[str, str]:
    """What the docstring says of each option, on one line."""
    text = (PrefixGrouperOptions.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    entries = re.split(r"\n        (?=\w+: )", text.rstrip())[1:]
    pairs = (entry.partition(": ") for entry in entries)
    said = {name: " ".join(rest.split()) for name, _, rest in pairs}
    if missing := [option.name for option in fields(PrefixGrouperOptions) if option.name not in said]:
        sys.exit(f"{', '.join(missing)}: not described. Fix: add it to Args in the docstring of PrefixGrouperOptions")
    return said


def taken_by(name: str) -> str:
    """The values that an option takes, as the error for a wrong one names them."""
    issue = next(option_issues({name: object()}), None)
    if issue is None:
        sys.exit(f"{name}: every value is taken. Fix: refuse wrong ones in _WORDS or _fault of config/options.py")
    listed = issue.why.partition("the values are ")[2]
    return listed or issue.fix.partition("=")[2].replace("<", "").replace(">", "")


def page() -> str:
    """The whole page."""
    said = descriptions()
    rows = []
    for option in fields(PrefixGrouperOptions):
        text = said[option.name].replace("``", "`")
        default = "null" if option.default is None else option.default
        rows.append(f"| `{option.name}` | `{default}` | {taken_by(option.name)} | {text} |\n")
    return HEAD + "".join(rows)


def hydra_file(text: str) -> str:
    """The Hydra file with what the dataclass says of each option above it."""
    said, lines = descriptions(), []
    for option in fields(PrefixGrouperOptions):
        about = f"{said[option.name].replace('``', '')} Values: {taken_by(option.name)}."
        lines += ["", *textwrap.wrap(about, 120, initial_indent="  # ", subsequent_indent="  # ")]
        lines.append(f"  {option.name}: {VALUES.get(option.default, option.default)}")
    return text.partition("PrefixGrouperOptions\n")[0] + "PrefixGrouperOptions\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    code = 0
    for file, text in ((PAGE, page()), (HYDRA, hydra_file(HYDRA.read_text()))):
        if check and not (file.is_file() and file.read_text() == text):
            sys.stderr.write(f"{file} is stale; run scripts/upkeep/make_options_page.py\n")
            code = 1
        if not check:
            file.write_text(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
