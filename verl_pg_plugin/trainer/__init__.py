"""verl's trainers, V1 and V0, with the groups of a batch kept on one rank.

Where the plugin is in force this happens by itself: ``_balance_batch`` of verl's own trainers, from which others are
derived, assigns groups at its end (``upstream``). A trainer whose ``_balance_batch`` does not call verl's is wrapped
where it is made::

    from verl_pg_plugin.trainer import keep_groups

    @register_trainer("mine")
    @keep_groups
    class MyTrainer(PPOTrainerSync): ...
"""

import sys
from typing import TypeVar

from verl_pg_plugin import upstream
from verl_pg_plugin.trainer.groups import regroup, updated

__all__ = ["keep_groups"]

TrainerT = TypeVar("TrainerT")

BASES = "verl.trainer.ppo.v1.trainer_base.PPOTrainer", "verl.trainer.ppo.ray_trainer.RayPPOTrainer"


def keep_groups(trainer_cls: type[TrainerT]) -> type[TrainerT]:
    """The same class, whose ranks get whole groups in runs that share prefixes; in others it does what it did.

    Its own ``_balance_batch`` runs first and may pad, filter or replace the batch; the order of what it leaves is ours.
    All else about the trainer stays, ``fit`` and ``step`` too: they get whole groups where they call the balance, and a
    trainer that updates its actor without it is warned about once.

    Args:
        trainer_cls: derived from verl's V1 ``PPOTrainer`` or V0 ``RayPPOTrainer``.

    Raises:
        TypeError: the class is derived from neither.
    """
    if not issubclass(trainer_cls, tuple(verls_trainers())):
        place = f"{trainer_cls.__module__}.{trainer_cls.__qualname__}"
        raise TypeError(f"{place} is derived from neither {' nor '.join(BASES)}")
    upstream.regroup_after_balance(trainer_cls, regroup, updated)
    return trainer_cls


def verls_trainers() -> list[type]:
    """verl's own, as far as this process has imported them; a version of verl need not have both."""
    loaded = ((sys.modules.get(module), name) for module, _, name in (path.rpartition(".") for path in BASES))
    return [getattr(module, name) for module, name in loaded if hasattr(module, name)]
