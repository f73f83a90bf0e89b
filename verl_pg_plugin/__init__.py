"""RL training in verl that computes every shared prompt once and no padding tokens.

verl imports this package in each of its processes (entry point group ``verl.plugins``). The package registers its
engines once verl is imported; their modules load when a run selects the mode. A failed registration is a warning,
because verl would swallow an exception, until a run selects the mode: then it ends.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl_pg_plugin import upstream
from verl_pg_plugin.after_import import after_import, registrations

if TYPE_CHECKING:
    from omegaconf import DictConfig

__version__ = "0.1.0"

logger = logging.getLogger(__name__)
NOT_REGISTERED = "engines are not registered", "actor_rollout_ref.actor.use_prefix_grouper=true"
SEPARATE_FORWARD = "old log-probs are computed in a separate forward"
GROUPS_CUT = "dispatch may split groups over ranks, which reduces sharing"


def register() -> None:
    """Import and register the engines, and the CPU default if VERL_PLATFORM=cpu. Idempotent.

    Raises:
        Exception: from the import of verl or of an engine, or RuntimeError if another plugin has registered its engine.
    """
    _hook()
    from verl_pg_plugin.engine import engine, registration  # noqa: F401

    registration.register_engines()


def _hook() -> None:
    """Register the patches that run before a mode is selected. The CPU default registers on import."""
    import verl_pg_plugin.cpu  # noqa: F401

    after_import("verl.trainer.ppo.v1.trainer_base", _patch_trainers)
    after_import("verl.trainer.ppo.ray_trainer", _patch_trainers)
    after_import("verl.trainer.main_ppo", _engage_before_run)
    upstream.call_before("verl.utils.config.validate_config", _engage_or_exit)


def _patch_trainers() -> None:
    """Keep groups together, and postpone old log-probs, in every process that imports a trainer module."""
    with _or_warn(GROUPS_CUT):
        from verl_pg_plugin import trainer  # other processes need not load it

        for trainer_cls in trainer.verls_trainers():
            with _or_warn(GROUPS_CUT):
                trainer.keep_groups(trainer_cls)
            with _or_warn(SEPARATE_FORWARD):
                trainer.postpone_old_log_probs(trainer_cls)


def _engage_before_run() -> None:
    """Check runs of entry points other than verl's own."""
    with _or_warn("runs of recipes are not checked before they start, and may ignore the flag"):
        upstream.call_before("verl.trainer.main_ppo.run_ppo", _engage_or_exit)


@contextmanager
def _or_warn(consequence: str, *ends_with: str) -> Iterator[None]:
    """Log a failure, because verl's import must continue; exit if the command line has an ``ends_with`` argument."""
    try:
        yield
    except Exception as error:
        why = f"{consequence} ({type(error).__name__}: {error}). Fix: run python -m verl_pg_plugin doctor"
        if flags := [word for word in sys.argv if word.lstrip("+").lower() in ends_with]:
            sys.stderr.write(f"verl_pg_plugin {__version__}: {flags[0]}: {why}\n")
            raise SystemExit(2) from None
        logger.warning("verl_pg_plugin %s: %s", __version__, why)


def _engage_or_exit(config: DictConfig) -> None:
    from verl_pg_plugin.config.engage import engage_or_exit  # most processes do not need it

    engage_or_exit(config)


def _be_heard() -> None:
    """Log our warnings in vLLM's processes, where a package sets the root logger to LOG_LEVEL or ERROR."""
    handler = logging.StreamHandler()  # for records that no root handler writes, in verl's format
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    handler.addFilter(lambda record: all(record.levelno < other.level for other in logging.root.handlers))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(min(logging.WARNING, logging.root.level))


def _hook_or_warn() -> None:
    registrations.append(register)
    with _or_warn(*NOT_REGISTERED):
        _hook()
    after_import("verl.workers.engine", _register_or_warn)


def _register_or_warn() -> None:
    with _or_warn(*NOT_REGISTERED):
        from verl_pg_plugin.engine.registration import register_engines  # loads verl's platform

        logger.info("verl_pg_plugin %s: engines registered for %s", __version__, ", ".join(register_engines()))


# If this package was imported before verl, verl's entry point loads it from the cache and runs nothing.
after_import("verl", _hook_or_warn)
after_import("model_hosting_container_standards.logging_config", _be_heard)
