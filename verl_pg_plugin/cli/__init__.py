"""Subcommands of ``python -m verl_pg_plugin``."""


class CommandError(Exception):
    """A subcommand cannot do what was asked; the message is one line that names the cause and the fix."""


def in_columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of rows of equal length, their cells aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
