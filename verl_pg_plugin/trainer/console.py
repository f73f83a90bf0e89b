"""The console of a run whose prefixes are shared, where the user has not asked for verl's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin import upstream
from verl_pg_plugin.config.keys import OPTIONS
from verl_pg_plugin.reporting.step_table import StepTable

__all__ = ["console", "is_short", "show_config_shortly"]

logger = logging.getLogger(__name__)


def is_short(config: DictConfig) -> bool:
    """Whether the console shows a table."""
    return OmegaConf.select(config, f"{OPTIONS}.console") != "full"


@contextmanager
def console(config: DictConfig, total_steps: int | None, v0: bool = False) -> Iterator[None]:
    """Within the block, a trainer of verl's shows its steps in a table; behind it, what sharing gained.

    Args:
        config: of the run.
        total_steps: of the run, None where it is unknown.
        v0: whether the trainer is one of V0.
    """
    if not is_short(config) or "console" not in _loggers(config):
        yield  # without that logger nothing would feed the table, and verl's progress bar is all there is
        return
    table = StepTable(total_steps)
    try:
        with upstream.steps_shown_by(table, v0):
            yield
    finally:
        table.close()  # a run that was stopped has gained as well


def _loggers(config: DictConfig) -> list[str]:
    loggers = OmegaConf.select(config, "trainer.logger")
    return [loggers] if isinstance(loggers, str) else list(loggers or ())


def show_config_shortly(config: Any) -> None:
    """Say where the config is, in place of its thousand lines.

    Args:
        config: as verl prints it, a nested dict.
    """
    logger.warning(
        "config: %d settings, in .hydra/config.yaml of the run's folder; ++prefix_grouper.console=full shows them here",
        _num_settings(config),
    )


def _num_settings(config: Any) -> int:
    return sum(map(_num_settings, config.values())) if isinstance(config, dict) else 1
