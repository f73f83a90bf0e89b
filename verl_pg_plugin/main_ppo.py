"""``python -m verl_pg_plugin.main_ppo``: verl's PPO entry point with this plugin's config and validators.

Takes every override of ``python -m verl.trainer.main_ppo``. A run that cannot start as configured ends
with a message on stderr and exit code 2, before Ray starts.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import hydra
import ray
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.main_ppo import run_ppo
from verl.utils.device import auto_set_device

from verl_pg_plugin import register
from verl_pg_plugin.config.engage import select_trainer
from verl_pg_plugin.config.keys import group_keeping
from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.config.options import added
from verl_pg_plugin.config.preflight import check
from verl_pg_plugin.issue import EXIT_USER_ERROR

# ConfigError is a ValueError; an interpolation that leads nowhere is OmegaConf's.
USER_ERRORS = (ValueError, OmegaConfBaseException)


def prepare(config: DictConfig) -> Any:
    """Validate ``config``, select its trainer and return the task runner class that runs it.

    Raises:
        ConfigError: with everything that can be known against the run; ``validate_config`` of verl is part of that.
        ValueError: the trainer is unknown, or derived from none of verl's, so that its groups cannot be kept together.
        omegaconf.errors.OmegaConfBaseException: when an interpolation cannot be resolved.
    """
    auto_set_device(config)
    check(config)
    use_v1 = bool(config.trainer.get("use_v1"))  # a verl with one kind of trainers has no such key
    if not mode_of(config).shares_prefixes:
        return verls_task_runner(use_v1)
    runner = task_runner(use_v1)
    if use_v1:
        register()  # this module may have been what the package was first imported for
        try:
            from verl.trainer.ppo.v1 import get_trainer_cls

            get_trainer_cls(group_keeping(config.trainer.v1.trainer_mode))
        except (ImportError, TypeError) as error:
            raise ValueError(f"trainer.use_v1=True: {error}") from None
    select_trainer(config)
    return runner


def verls_task_runner(use_v1: bool) -> Any:
    """The actor class that runs verl's V1 or V0 trainer.

    Raises:
        ValueError: this verl has no such trainers.
    """
    try:
        if use_v1:
            from verl.trainer.main_ppo import TaskRunnerV1

            return TaskRunnerV1
        from verl.trainer.main_ppo_v0 import TaskRunner
    except ImportError as error:
        raise ValueError(f"trainer.use_v1={use_v1}: {error}; set trainer.use_v1={not use_v1}") from error
    return TaskRunner


def task_runner(use_v1: bool) -> Any:
    """verl's task runner in a process that has loaded this plugin, whatever ``VERL_USE_EXTERNAL_PLUGINS`` says."""
    # An actor class cannot be subclassed; the class that it wraps can.
    wrapped = verls_task_runner(use_v1).__ray_actor_class__

    class PrefixGrouperTaskRunner(wrapped):  # type: ignore[valid-type, misc]
        def run(self, config: DictConfig) -> None:
            register()
            super().run(config)

    return ray.remote(PrefixGrouperTaskRunner)


def main() -> None:
    """Entry point: user errors exit with code 2 and no traceback, a failed training with code 1."""
    sys.argv[1:] = map(added, sys.argv[1:])
    _run()


@hydra.main(config_path="config/hydra", config_name="pg_ppo_trainer", version_base=None)
def _run(config: DictConfig) -> None:
    try:
        task_runner_class = prepare(config)
    except USER_ERRORS as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_USER_ERROR)
    inspect.unwrap(run_ppo)(config, task_runner_class=task_runner_class)  # without the hook that would ask all again


if __name__ == "__main__":
    main()
