"""Subcommands of ``python -m verl_pg_plugin`` and their output."""

import argparse
from dataclasses import dataclass

OK, WARN, FAIL = "OK", "WARN", "FAIL"
MODE = "mode"  # subject of the line whose fix switches sharing on
MAX_COUNT = 10**9  # pairs of tokens fit int64


class CommandError(Exception):
    """A subcommand cannot run; the message is one line with the cause and the fix."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    status: str  # OK, WARN (a run still starts) or FAIL
    what: str  # subject
    text: str
    fix: str = ""  # override or command that removes a warning or failure


Section = tuple[str, list[Check]]


def count(text: str) -> int:
    """Read an argument that is an integer from 1 to ``MAX_COUNT``."""
    if not (text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= MAX_COUNT):
        raise argparse.ArgumentTypeError(f"{text} is not an integer from 1 to {MAX_COUNT:,}")
    return int(text)


def in_columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Format rows of equal length as lines with left-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
