"""Write docs/options.md and the options of the Hydra file from their dataclass.

    python scripts/upkeep/make_options_page.py [--check]

With ``--check`` nothing is written, and the exit code is 1 if a file is stale.
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
"""Defaults in YAML, where a bare off is False."""
HEAD = """\
# Options

Most runs need none of these options. Add `++prefix_grouper.NAME=VALUE` to the command line of any RL run. The config of
`python -m verl_pg_plugin.main_ppo` has the section `prefix_grouper`, so `++` is not needed there. A wrong value is
refused before Ray starts.

The guides say when to change one: [memory and speed](memory-and-speed.md), [rollouts](rollouts.md) and
[verify](verify.md). The [glossary](glossary.md) has the terms. `scripts/upkeep/make_options_page.py` writes this page
from `config/options.py`.

| option | default | takes | what it does |
|---|---|---|---|
"""


def descriptions() -> dict[str, str]:
    """Return each option's description in the docstring, on one line."""
    text = (PrefixGrouperOptions.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    entries = re.split(r"\n        (?=\w+: )", text.rstrip())[1:]
    pairs = (entry.partition(": ") for entry in entries)
    texts = {name: " ".join(rest.split()) for name, _, rest in pairs}
    if missing := [option.name for option in fields(PrefixGrouperOptions) if option.name not in texts]:
        sys.exit(f"{', '.join(missing)}: not described. Fix: add it to Args in the docstring of PrefixGrouperOptions")
    return texts


def taken_by(name: str) -> str:
    """Return the values that an option takes, from the error for a wrong one."""
    issue = next(option_issues({name: object()}), None)
    if issue is None:
        sys.exit(f"{name}: every value is taken. Fix: refuse wrong ones in _WORDS or _fault of config/options.py")
    listed = issue.why.partition("the values are ")[2]
    return listed or issue.fix.partition("=")[2].replace("<", "").replace(">", "")


def page() -> str:
    """Return docs/options.md."""
    texts, rows = descriptions(), []
    for option in fields(PrefixGrouperOptions):
        text = texts[option.name].replace("``", "`")
        default = "null" if option.default is None else option.default
        rows.append(f"| `{option.name}` | `{default}` | {taken_by(option.name)} | {text} |\n")
    return HEAD + "".join(rows)


def hydra_file(text: str) -> str:
    """Return the Hydra file with each option's description above it."""
    texts, lines = descriptions(), []
    for option in fields(PrefixGrouperOptions):
        about = f"{texts[option.name].replace('``', '')} Values: {taken_by(option.name)}."
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
