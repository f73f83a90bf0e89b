"""Subcommands of ``python -m verl_pg_plugin``, and how they write what they found."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

OK, WARN, FAIL, FACT = "OK", "WARN", "FAIL", ""


class CommandError(Exception):
    """A subcommand cannot do what was asked; the message is one line that names the cause and the fix."""


def in_columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of rows of equal length, their cells aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


@dataclass(frozen=True)
class Line:
    """One line of the report.

    Attributes:
        state: OK, WARN (a run starts all the same), FAIL, or empty for what is neither good nor bad.
        what: it is about.
        text: what was found.
        fix: of a warning or failure, the override or command that removes it.
    """

    state: str
    what: str
    text: str
    fix: str = ""


Section = tuple[str, list[Line]]


def show(sections: Iterable[Section]) -> int:
    """Write the sections as they come, each line with its state and, below it, its fix; then the verdict.

    Returns:
        Exit code: 1 if a line is FAIL, else 0.
    """
    states: list[str] = []
    for title, lines in sections:
        sys.stdout.write(f"{title}\n")
        texts = in_columns([(line.state.ljust(4), line.what, line.text) for line in lines])
        for line, text in zip(lines, texts, strict=True):
            sys.stdout.write(f"  {text}\n" + (f"        fix: {line.fix}\n" if line.fix else ""))
            states.append(line.state)
    failures, doubts = states.count(FAIL), states.count(WARN)
    verdict = FAIL if failures else WARN if doubts else OK
    sys.stdout.write(f"{verdict}: {failures} failing, {doubts} to look at\n")
    return int(failures > 0)
