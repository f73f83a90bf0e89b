"""verl's trainers, V1 and V0, with the groups of a batch kept on one rank.

Where the plugin is in force and a run shares prefixes, this happens by itself: V1 looks its trainer up by name and gets
the class registered under that name through ``keep_groups``, whoever registered it; V0's trainers, and those of
recipes derived from them, assign groups at the end of verl's own ``_balance_batch`` (``upstream/``). A trainer that
neither way reaches is wrapped where it is made::

    from verl_pg_plugin.trainer import keep_groups

    @register_trainer("mine")
    @keep_groups
    class MyTrainer(PPOTrainerSync): ...
"""

from __future__ import annotations

import functools
import sys
from typing import Any, TypeVar

from verl_pg_plugin.trainer.groups import NumMiniBatches, mini_batches_of_config
from verl_pg_plugin.trainer.mixins import KeepsGroups, KeepsGroupsV0, KeepsGroupsV1

__all__ = ["keep_groups"]

TrainerT = TypeVar("TrainerT")

KINDS: dict[str, type[KeepsGroups]] = {
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer": KeepsGroupsV1,
    "verl.trainer.ppo.ray_trainer.RayPPOTrainer": KeepsGroupsV0,
}
"""verl's two base classes, and what goes in front of a class derived from them."""


def keep_groups(
    trainer_cls: type[TrainerT], num_mini_batches: NumMiniBatches = mini_batches_of_config
) -> type[TrainerT]:
    """A subclass whose ranks get whole groups, in runs that share prefixes; in others it does what its base does.

    The base's own ``_balance_batch`` runs first and may pad, filter or replace the batch; the order of what it leaves
    is ours. All else about the trainer stays, ``fit`` and ``step`` too: they get whole groups where they call the
    balance, and a trainer that updates its actor without it is warned about once.

    Args:
        trainer_cls: derived from verl's V1 ``PPOTrainer`` or V0 ``RayPPOTrainer``; one that keeps groups already is
            returned as it is.
        num_mini_batches: for a trainer that does not divide batches by ``actor.ppo_mini_batch_size``.

    Raises:
        TypeError: the class is derived from neither.
    """
    if issubclass(trainer_cls, KeepsGroups):
        return trainer_cls
    return _wrapped(trainer_cls, num_mini_batches)  # type: ignore[arg-type]  # mypy finds no __hash__ in a type


@functools.cache
def _wrapped(trainer_cls: Any, num_mini_batches: NumMiniBatches) -> Any:
    for base, mixin in KINDS.items():
        module, _, name = base.rpartition(".")
        # Whoever derives from a class has imported it; a version of verl need not have both.
        if issubclass(trainer_cls, getattr(sys.modules.get(module), name, ())):
            about = {name: getattr(trainer_cls, name) for name in ("__doc__", "__module__")}
            members = {**about, "num_mini_batches": staticmethod(num_mini_batches)}
            return type(trainer_cls)(f"Group{trainer_cls.__name__}", (mixin, trainer_cls), members)
    place = f"{trainer_cls.__module__}.{trainer_cls.__qualname__}"
    raise TypeError(f"{place} is derived from neither {' nor '.join(KINDS)}")
