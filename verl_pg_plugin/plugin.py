"""Entering this plugin into verl's registries, and into its own entry point."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from verl_pg_plugin.after_import import after_import

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["register"]

logger = logging.getLogger(__name__)


def register() -> None:
    """Put the engines, and on request the CPU default, in force; calling it again changes nothing.

    Where the import of a module of ours is what imports verl, the engines may need that very module: they wait for the
    next call, which ``PrefixGrouperEngineConfig`` makes when the mode is asked for. The CPU default registers itself
    when it was that module.

    Raises:
        Exception: what the import of verl or of an engine raises, or RuntimeError when another plugin holds our place.
    """
    from verl_pg_plugin.reporting.quiet import limit_transfer_threads, pass_over_missing_engines

    limit_transfer_threads()
    pass_over_missing_engines()
    from verl_pg_plugin import cpu, upstream

    if not _loading(cpu):
        cpu.register()
    if any(_loading(module) for name, module in list(sys.modules.items()) if name.startswith("verl_pg_plugin.")):
        return

    from verl_pg_plugin.engine.registration import register_engines  # verl asks for the platform on import

    register_engines()
    after_import("verl.trainer.ppo.v1", _register_trainers)
    upstream.call_before_validation(_engage_or_exit)


def _register_trainers() -> None:
    """In the process of verl's task runner, which looks its trainer up by name."""
    try:
        import verl_pg_plugin.trainer.group_trainers  # noqa: F401  (registers the three classes)
    except Exception as error:  # an import of verl's must not fail for it, and a run that needs one ends anyway
        logger.warning("verl_pg_plugin: trainers are not registered (%s: %s)", type(error).__name__, error)


def _engage_or_exit(config: DictConfig) -> None:
    from verl_pg_plugin.config.engage import engage_or_exit  # what most processes of a run never need

    engage_or_exit(config)


def _loading(module: object) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)
