"""Keep the groups of a batch on one rank in verl's trainers, V1 and V0.

The plugin patches ``_balance_batch`` of verl's own trainers (``upstream``), so derived trainers need nothing. Wrap a
trainer whose ``_balance_batch`` does not call verl's::

    from verl_pg_plugin.trainer import keep_groups

    @register_trainer("mine")
    @keep_groups
    class MyTrainer(PPOTrainerSync): ...
"""

import sys
from typing import TypeVar

from verl_pg_plugin import upstream
from verl_pg_plugin.trainer.groups import regroup, updated
from verl_pg_plugin.trainer.old_log_probs import compute_or_postpone, update_and_complete

__all__ = ["keep_groups"]

TrainerT = TypeVar("TrainerT")

BASES = "verl.trainer.ppo.v1.trainer_base.PPOTrainer", "verl.trainer.ppo.ray_trainer.RayPPOTrainer"


def keep_groups(trainer_cls: type[TrainerT]) -> type[TrainerT]:
    """Patch a trainer class so that its ranks get whole groups in runs that share prefixes, and return the class.

    Its own ``_balance_batch`` runs first and may pad, filter or replace the batch; then the plugin reorders it. ``fit``
    and ``step`` stay as they are. A trainer that updates its actor without balancing logs one warning.

    Args:
        trainer_cls: derived from verl's V1 ``PPOTrainer`` or V0 ``RayPPOTrainer``.

    Raises:
        TypeError: the class is derived from neither.
    """
    if not issubclass(trainer_cls, tuple(verls_trainers())):
        name = f"{trainer_cls.__module__}.{trainer_cls.__qualname__}"
        raise TypeError(f"{name} is derived from neither {' nor '.join(BASES)}")
    upstream.regroup_after_balance(trainer_cls, regroup, updated)
    return trainer_cls


def postpone_old_log_probs(trainer_cls: type) -> None:
    """Patch one of verl's trainers to take old log-probs from the update where nothing else needs them."""
    upstream.take_old_log_probs_from_update(trainer_cls, compute_or_postpone, update_and_complete)


def verls_trainers() -> list[type]:
    """Return verl's trainers that this process has imported; a version of verl may lack one."""
    loaded = ((sys.modules.get(module), name) for module, _, name in (path.rpartition(".") for path in BASES))
    return [getattr(module, name) for module, name in loaded if hasattr(module, name)]
