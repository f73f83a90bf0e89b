"""Which sequences meet on a rank: verl's lookup of V1 trainers, and the balance of V0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from verl_pg_plugin.upstream.changed import check_parameters, names_of_verl


def look_up_group_trainers(prefix: str, keep_groups: Callable[[type], type]) -> None:
    """Let verl find, under ``prefix`` and the name of any V1 trainer, that trainer with groups kept together.

    What: ``verl.trainer.ppo.v1.get_trainer_cls`` returns ``keep_groups(cls)`` for such a name, unless somebody has
    registered a class under the whole name. The task runner imports it from there when it runs; put in once per process
    and left there.
    Why: the registry holds one class per name, and others register theirs at any time, also after this plugin has been
    loaded; verl has no hook between looking a trainer up and building it.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: V1 trainers take a balance, or the order of groups is verl's own.

    Raises:
        UpstreamChangedError: the function or verl's registry is gone, or its parameters are not ``(name)``.
    """
    with names_of_verl():
        from verl.trainer.ppo import v1

        look_up, registry = v1.get_trainer_cls, attrgetter("trainer_base.TRAINER_REGISTRY")
        registry(v1)
    if getattr(look_up, "keeps_groups", False):
        return
    check_parameters(look_up, "verl.trainer.ppo.v1.get_trainer_cls", ["name"])

    @functools.wraps(look_up)
    def look_up_with_groups(name: str) -> type:
        plain = name.removeprefix(prefix)
        if plain == name or name in registry(v1):
            return look_up(name)
        return keep_groups(look_up(plain))

    look_up_with_groups.keeps_groups = True  # type: ignore[attr-defined]
    v1.get_trainer_cls = look_up_with_groups


@contextmanager
def verls_groups_off(trainer: Any) -> Iterator[None]:
    """Within the block a V0 trainer balances as without the flag: its own balance of groups refuses a number of them
    that the ranks do not divide.
    """
    asked, trainer.use_prefix_grouper = trainer.use_prefix_grouper, False
    try:
        yield
    finally:
        trainer.use_prefix_grouper = asked


def regroup_after_v0_balance(
    regroup: Callable[[Any, Any, dict[str, Any], str], None], updated: Callable[[Any, dict[str, Any]], None]
) -> None:
    """Let V0 trainers assign whole groups by what they cost, whatever their number, and show what updates computed.

    What: ``verl.trainer.ppo.ray_trainer.RayPPOTrainer._balance_batch`` of a trainer whose ``use_prefix_grouper`` is set
    balances as without it, and then calls ``regroup(trainer, batch, metrics, logging_prefix)``; its ``_update_actor``
    calls ``updated(trainer, metrics)`` at the end. Put in once per process and left there; trainers that share nothing
    are left as before.
    Why: with the flag verl refuses a number of groups that the ranks do not divide, weighs a prompt once for each of
    its responses, and lets mini-batches fall where they may. V0's task runners, verl's own and those of its recipes,
    name their trainer's class, so that no other class can be handed in.
    Versions: verl 0.9.0 and 0.9.1.
    Remove when: V0 looks its trainer up by config, or is gone.

    Raises:
        UpstreamChangedError: the class or a method is gone, or the parameters are not ``(self, batch, metrics,
            logging_prefix, keep_minibatch)`` and ``(self, batch)``.
    """
    with names_of_verl():
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        balance, update = RayPPOTrainer._balance_batch, RayPPOTrainer._update_actor
    if getattr(balance, "keeps_groups", False):
        return
    path = "verl.trainer.ppo.ray_trainer.RayPPOTrainer"
    parameters = ["self", "batch", "metrics", "logging_prefix", "keep_minibatch"]
    check_parameters(balance, f"{path}._balance_batch", parameters)
    check_parameters(update, f"{path}._update_actor", ["self", "batch"])

    @functools.wraps(balance)
    def balance_then_regroup(
        self: Any,
        batch: Any,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> None:
        if not getattr(self, "use_prefix_grouper", False):  # recipes set it by hand, or not
            return balance(self, batch, metrics, logging_prefix, keep_minibatch)
        with verls_groups_off(self):
            balance(self, batch, metrics, logging_prefix, keep_minibatch)
        regroup(self, batch, metrics, logging_prefix)

    @functools.wraps(update)
    def update_then_show(self: Any, batch: Any) -> Any:
        output = update(self, batch)
        if getattr(self, "use_prefix_grouper", False):
            updated(self, output.meta_info["metrics"])
        return output

    balance_then_regroup.keeps_groups = True  # type: ignore[attr-defined]
    RayPPOTrainer._balance_batch, RayPPOTrainer._update_actor = balance_then_regroup, update_then_show
