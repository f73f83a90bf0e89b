"""Where a run starts: verl's entry points, what they print, and the loggers of its V1 trainer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl_pg_plugin.upstream.changed import UpstreamChangedError, check_parameters, names_of_verl


def call_before_validation(action: Callable[[Any], None]) -> None:
    """Show ``action`` the composed config of a run of verl's entry points before they validate it.

    What: ``verl.utils.config.validate_config`` calls ``action(config)`` first. Entry points import it by name after
    verl has loaded its plugins, so they get this one; put in once per process and left there.
    Why: ``python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_prefix_grouper=True`` trains without sharing
    anything and says nothing: the flag is in verl's config and in no engine config, and verl has no hook for plugins
    between the composition of a config and the start of Ray.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: verl hands ``actor.use_prefix_grouper`` to its engines, or drops the flag.

    Raises:
        UpstreamChangedError: the function is gone, or its parameters are not ``(config, use_reference_policy,
            use_critic)``.
    """
    with names_of_verl():
        import verl.utils.config as patched

        validate = patched.validate_config
    if getattr(validate, "calls_before", False):
        return
    check_parameters(validate, "verl.utils.config.validate_config", ["config", "use_reference_policy", "use_critic"])

    @functools.wraps(validate)
    def act_then_validate(config: Any, *args: Any, **kwargs: Any) -> Any:
        action(config)
        return validate(config, *args, **kwargs)

    act_then_validate.calls_before = True  # type: ignore[attr-defined]
    patched.validate_config = act_then_validate


def call_before_run(action: Callable[[Any], None]) -> None:
    """Show ``action`` the composed config of every run that verl's ``run_ppo`` starts, before it starts Ray.

    What: ``verl.trainer.main_ppo.run_ppo`` calls ``action(config)`` first. Put in once per process and left there.
    Why: entry points of recipes, verl's one-step-off and fully async ones among them, validate their config inside Ray
    or not at all; they import this function when they run. verl's own entry point does not pass through here: run with
    ``python -m`` it is another module, ``__main__`` (see :func:`call_before_validation`).
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: verl hands ``actor.use_prefix_grouper`` to its engines, or drops the flag.

    Raises:
        UpstreamChangedError: the function is gone, or its parameters are not ``(config, task_runner_class)``.
    """
    with names_of_verl():
        import verl.trainer.main_ppo as patched

        run_ppo = patched.run_ppo
    if getattr(run_ppo, "calls_before", False):
        return
    check_parameters(run_ppo, "verl.trainer.main_ppo.run_ppo", ["config", "task_runner_class"])

    @functools.wraps(run_ppo)
    def act_then_run(config: Any, *args: Any, **kwargs: Any) -> None:
        action(config)
        run_ppo(config, *args, **kwargs)

    act_then_run.calls_before = True  # type: ignore[attr-defined]
    patched.run_ppo = act_then_run


def show_config_by(show: Callable[[Any], None]) -> None:
    """Let verl's task runners hand the config to ``show`` where they would print it.

    What: ``pprint`` as ``verl.trainer.main_ppo`` sees it, and ``__main__`` where that is the running entry point. Ray
    copies task runners with the names that they see, so it counts in the process that starts them. Left there.
    Why: each run begins with 1,000 lines of config, and there is no setting for it. Hydra keeps the same in a file.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: verl leaves the config out of the log, or asks a setting.

    Args:
        show: a function of a module, which Ray can send by name; takes what verl would have printed.

    Raises:
        UpstreamChangedError: the entry point no longer prints the config by that name.
    """
    from verl.trainer import main_ppo

    main = sys.modules["__main__"]
    running = getattr(getattr(main, "__spec__", None), "name", "") == "verl.trainer.main_ppo"
    for module in (main_ppo, *([main] if running else [])):
        if not hasattr(module, "pprint"):
            raise UpstreamChangedError(
                "verl.trainer.main_ppo no longer prints the config with pprint; set ++prefix_grouper.console=full"
            )
        module.pprint = show


@contextmanager
def steps_shown_by(console: Any, v0: bool = False) -> Iterator[None]:
    """Within the block, verl's trainer of this process shows steps on ``console`` and no progress bar beside it.

    What: ``verl.utils.logger.LocalLogger``, which ``verl.utils.tracking.Tracking`` imports when it is built with the
    logger ``console``, and ``tqdm`` as ``verl.trainer.ppo.v1.trainer_base`` sees it, for V0
    ``verl.trainer.ppo.ray_trainer``; put back at the end of the block.
    Why: a step is one line of a hundred metrics, and loggers of other plugins cannot be registered.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: ``Tracking`` takes loggers of other packages.

    Args:
        console: has ``log(data, step)`` and ``flush()``.
        v0: whether the trainer is one of V0.

    Raises:
        UpstreamChangedError: one of the two is gone.
    """
    from verl.utils import logger as loggers

    if v0:
        from verl.trainer.ppo import ray_trainer as trainers
    else:
        from verl.trainer.ppo.v1 import trainer_base as trainers

    if not (hasattr(loggers, "LocalLogger") and hasattr(trainers, "tqdm")):
        raise UpstreamChangedError("verl's console logger or progress bar has moved; set ++prefix_grouper.console=full")
    local_logger, tqdm = loggers.LocalLogger, trainers.tqdm
    loggers.LocalLogger = lambda print_to_console=True: console
    trainers.tqdm = functools.partial(tqdm, disable=True)
    try:
        yield
    finally:
        loggers.LocalLogger, trainers.tqdm = local_logger, tqdm
