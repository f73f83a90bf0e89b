"""Where a run starts: verl's entry points."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_pg_plugin.upstream.changed import check_parameters, names_of_verl


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
