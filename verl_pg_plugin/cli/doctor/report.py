"""Sections of the doctor's report and how they are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

# Long enough for any line: a log has no width, and a fix that is wrapped cannot be copied.
_WIDTH_OF_A_FILE = 1000


@dataclass(frozen=True)
class Problem:
    """Something in the way.

    Attributes:
        what: cause, in one line.
        fix: override or command that removes it.
        is_warning: a run starts all the same, and would be slower than it could be.
    """

    what: str
    fix: str
    is_warning: bool = False


@dataclass(frozen=True)
class Section:
    """One table of the report, and the problems found in it."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    problems: tuple[Problem, ...] = ()


def show(sections: Iterable[Section]) -> int:
    """Write the sections as they come, then all problems, each with its fix.

    Returns:
        Exit code: 1 if there is a problem that is no mere warning, else 0.
    """
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE, highlight=False, markup=False)
    problems: list[Problem] = []
    for section in sections:
        console.print(section.title, style="bold")
        table = Table.grid(padding=(0, 3, 0, 0))
        for _ in range(max(map(len, section.rows), default=0)):
            table.add_column(overflow="fold")
        for row in section.rows:
            table.add_row("  " + row[0], *row[1:])
        console.print(table)
        problems += section.problems
    for kind, found in (
        ("problem", [problem for problem in problems if not problem.is_warning]),
        ("warning", [problem for problem in problems if problem.is_warning]),
    ):
        if found:
            console.print(f"{len(found)} {kind}{'s' if len(found) > 1 else ''}", style="bold")
        for number, problem in enumerate(found, start=1):
            console.print(f"{number}. {problem.what}\n   fix: {problem.fix}", soft_wrap=True)
    if not problems:
        console.print("all fine", style="bold")
    return int(any(not problem.is_warning for problem in problems))
