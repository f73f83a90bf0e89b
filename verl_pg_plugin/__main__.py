"""``python -m verl_pg_plugin SUBCOMMAND``."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from verl_pg_plugin import __version__
from verl_pg_plugin.cli import CommandError, demo, doctor, estimate, patch_model


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code, or 2 after a one-line error on stderr."""
    parser = argparse.ArgumentParser(prog="python -m verl_pg_plugin", description="Tools of verl_pg_plugin.")
    parser.add_argument("--version", action="version", version=f"verl_pg_plugin {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    for subcommand in (doctor, estimate, demo, patch_model):
        subcommand.add_parser(subparsers)
    args = parser.parse_args(argv)
    # The doctor reports the machine; verl's import warnings would only add noise.
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    try:
        return args.run(args) or 0
    except (CommandError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
