"""``doctor``: what verl would run on this machine, what a set of overrides would select, and what is in the way."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from typing import Any

from verl_pg_plugin.cli.doctor.report import Section, show

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add ``doctor`` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, and a set of overrides, without starting anything",
        description="Exit code 0: all fine. 1: problems, each with a fix. 2: the overrides cannot be read.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="of python -m verl_pg_plugin.main_ppo or verl.trainer.main_ppo: also what a run with them would say",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="import verl as a worker does, and look at engines and signatures; overrides imply it (half a minute)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the report.

    Returns:
        0, or 1 if there is a problem.

    Raises:
        CommandError: Hydra cannot compose the overrides.
    """
    if not (args.full or args.overrides):
        return show(_installed())
    # What verl and its imports have to say about this machine is in the report.
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    return show(_sections(args.overrides))


def _installed() -> Iterator[Section]:
    """What the metadata of packages tells, without an import of verl or torch."""
    from verl_pg_plugin.cli.doctor import environment, installed

    yield environment.versions()
    yield installed.plugin()
    yield installed.kernels()


def _sections(overrides: list[str]) -> Iterator[Section]:
    """Everything that can be said; verl or a plugin that does not load leaves out what needs its modules."""
    from verl_pg_plugin.cli.doctor import engines, environment

    process = engines.fresh_process()
    here = engines.registration_error() if process.loads else ""
    loads = process.loads and not here
    config = None
    if overrides and loads:
        from verl_pg_plugin.cli.doctor.overrides import compose_config, settings
        from verl_pg_plugin.cli.doctor.sharing import sharing

        config = compose_config(overrides)  # first, since a wrong one ends in a single line
    yield environment.versions()
    yield engines.plugins(process, here)
    if not process.error:  # nothing of a verl that cannot be imported can be looked at
        yield engines.engines(process)
        yield environment.parts()
    if loads:
        yield environment.kernels(process.device, process.available)
    if config is not None:
        yield settings(config)
        yield sharing(config)
