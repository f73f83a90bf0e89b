"""``python -m verl_pg_plugin SUBCOMMAND``."""

import argparse
import sys
from collections.abc import Sequence

from verl_pg_plugin import patch_model
from verl_pg_plugin.command import CommandError

SUBCOMMANDS = (patch_model,)
"""Modules with ``add_parser(subparsers)``, which sets the default ``run(args)`` of the parser it adds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        0, or 2 after an error that is written to stderr as one line.
    """
    parser = argparse.ArgumentParser(prog="python -m verl_pg_plugin", description="Tools of verl_pg_plugin.")
    subparsers = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except CommandError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
