"""RL training in verl that computes every shared prompt once and never a padding token.

verl imports this package in each of its processes (entry point group ``verl.plugins``). That registers the CPU default
on request, and the engines by name once verl's own are imported. Their modules load when a run selects the mode.
Imported without verl the package loads nothing, and registers as soon as verl is imported.

A registration that fails is a logged warning: verl would swallow an exception. A run that selects the mode still ends:
here where its command line does, else in preflight and in ``PrefixGrouperEngineConfig``, which call ``register``.
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
GROUPS_CUT = "groups stay as dispatch cuts them, which may cost sharing"


def register() -> None:
    """Put the engines, and on request the CPU default, in force, and import them; calling it again changes nothing.

    Raises:
        Exception: what the import of verl or of an engine raises, or RuntimeError when another plugin holds our place.
    """
    _hook()
    from verl_pg_plugin.engine import engine, registration  # noqa: F401

    registration.register_engines()


def _hook() -> None:
    """Register what must be there before a run selects a mode. The CPU default registers itself on import."""
    import verl_pg_plugin.cpu  # noqa: F401

    after_import("verl.trainer.ppo.v1.trainer_base", _keep_groups)
    after_import("verl.trainer.ppo.ray_trainer", _keep_groups)
    after_import("verl.trainer.main_ppo", _engage_before_run)
    upstream.call_before("verl.utils.config.validate_config", _engage_or_exit)


def _keep_groups() -> None:
    """In the process of the trainer, and in those that import its module for something else."""
    with _or_warn(GROUPS_CUT):
        from verl_pg_plugin.trainer import keep_groups, verls_trainers  # what other processes need not load

        for trainer_cls in verls_trainers():
            with _or_warn(GROUPS_CUT):
                keep_groups(trainer_cls)


def _engage_before_run() -> None:
    """In the process of an entry point that is not verl's own."""
    with _or_warn("runs of recipes are not checked before they start, and the flag may do nothing in them"):
        upstream.call_before("verl.trainer.main_ppo.run_ppo", _engage_or_exit)


@contextmanager
def _or_warn(consequence: str, *ends_with: str) -> Iterator[None]:
    """Log a failure, since imports of verl's must go on; end a process whose command line has one of the words."""
    try:
        yield
    except Exception as error:
        why = f"{consequence} ({type(error).__name__}: {error}); python -m verl_pg_plugin doctor says more"
        if asks := [word for word in sys.argv if word.lstrip("+").lower() in ends_with]:
            sys.stderr.write(f"verl_pg_plugin {__version__}: {asks[0]}, but {why}\n")
            raise SystemExit(2) from None
        logger.warning("verl_pg_plugin %s: %s", __version__, why)


def _engage_or_exit(config: DictConfig) -> None:
    from verl_pg_plugin.config.engage import engage_or_exit  # what most processes of a run never need

    engage_or_exit(config)


def _be_heard() -> None:
    """vLLM brings a package into verl's workers that sets the root logger and its handlers to LOG_LEVEL, else ERROR."""
    handler = logging.StreamHandler()  # for what none of those writes, in verl's format
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
        from verl_pg_plugin.engine.registration import register_engines  # verl asks for the platform on import

        logger.info("verl_pg_plugin %s: engines registered for %s", __version__, ", ".join(register_engines()))


# verl's entry point cannot register in a process that imported this package first: loading it again runs nothing.
after_import("verl", _hook_or_warn)
after_import("model_hosting_container_standards.logging_config", _be_heard)
