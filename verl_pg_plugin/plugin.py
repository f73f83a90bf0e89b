"""Entering this plugin into verl's registries and entry points."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_pg_plugin import upstream
from verl_pg_plugin.after_import import after_import, wait

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)


def register() -> None:
    """Put the engines, and on request the CPU default, in force; calling it again changes nothing.

    Where the import of a module of ours is what imports verl, the engines may need that very module: they wait for
    ``run_waiting``, which engine configs call. The CPU default registers itself when it is imported.

    Raises:
        Exception: what the import of verl or of an engine raises, or RuntimeError when another plugin holds our place.
    """
    import verl_pg_plugin.cpu  # noqa: F401

    after_import("verl.trainer.ppo.v1.trainer_base", partial(_or_warn, _keep_groups))
    after_import("verl.trainer.ppo.ray_trainer", partial(_or_warn, _keep_groups))
    after_import("verl.trainer.main_ppo", _engage_before_run)
    upstream.call_before_validation(_engage_or_exit)
    if any(_loading(module) for name, module in list(sys.modules.items()) if name.startswith("verl_pg_plugin.")):
        wait(register)
        return

    from verl_pg_plugin.engine.registration import register_engines  # verl asks for the platform on import

    register_engines()


def _engage_before_run() -> None:
    """In the process of an entry point that is not verl's own."""
    _or_warn(upstream.call_before_run, _engage_or_exit)


def _keep_groups() -> None:
    """In the process of the trainer, and in those that import its module for something else."""
    from verl_pg_plugin.trainer import keep_groups, verls_trainers  # what other processes need not load

    for trainer_cls in verls_trainers():
        _or_warn(keep_groups, trainer_cls)


def _or_warn(patch: Callable[..., object], *args: Any) -> None:
    """An import of verl's must not fail for it: without the patch groups stay as dispatch cuts them."""
    try:
        patch(*args)
    except (upstream.UpstreamChangedError, ImportError) as error:
        logger.warning("verl_pg_plugin: trainers of this verl are left alone: %s", error)


def _engage_or_exit(config: DictConfig) -> None:
    from verl_pg_plugin.config.engage import engage_or_exit  # what most processes of a run never need

    engage_or_exit(config)


def _loading(module: object) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)
