"""Subcommands of ``python -m verl_pg_plugin``, and how they write what they found."""

from dataclasses import dataclass

OK, WARN, FAIL = "OK", "WARN", "FAIL"
MODE = "mode"  # what the line is about whose fix switches sharing on; it has none where prefixes are shared


class CommandError(Exception):
    """A subcommand cannot do what was asked; the message is one line that names the cause and the fix."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report: what was found."""

    status: str  # OK, WARN (a run starts all the same) or FAIL
    what: str  # it is about
    text: str
    fix: str = ""  # of a warning or failure, the override or command that removes it


Section = tuple[str, list[Check]]


def in_columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of rows of equal length, their cells aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
