"""verl's trainers, V1 and V0, with the groups of a batch kept on one rank.

Where the plugin is in force and a run shares prefixes, this happens by itself: V1 looks its trainer up by name and gets
the class registered under that name through ``keep_groups``, whoever registered it; V0's trainers, and those of
recipes derived from them, assign groups at the end of verl's own ``_balance_batch`` (``upstream``). A trainer that
neither way reaches is wrapped where it is made::

    from verl_pg_plugin.trainer import keep_groups

    @register_trainer("mine")
    @keep_groups
    class MyTrainer(PPOTrainerSync): ...
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from omegaconf import DictConfig

from verl_pg_plugin import upstream
from verl_pg_plugin.config.keys import TRAINER_PREFIX
from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.trainer.groups import (
    ESTIMATED_TOKENS,
    NumMiniBatches,
    actor_flops,
    log_gain,
    mini_batches_of_config,
    regroup_v0,
    regroup_v1,
)

__all__ = ["keep_groups"]

logger = logging.getLogger(__name__)

TrainerT = TypeVar("TrainerT")


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


class KeepsGroups:
    """Goes in front of a trainer class; ``model_flops`` of the actor are None in a run that shares no prefixes."""

    config: DictConfig
    actor_rollout_wg: Any
    model_flops: ModelFlops | None
    num_mini_batches: ClassVar[NumMiniBatches]
    regroup: ClassVar[Callable[..., None]]
    _is_balanced = False
    _has_warned = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Before any worker starts, so that what cannot be priced fails at once.
        self.model_flops = actor_flops(self.config) if mode_of(self.config).shares_prefixes else None

    def _balance_batch(
        self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        """verl may pad the batch to a multiple it can dispatch and tears groups apart; put them together again."""
        replaced = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)  # type: ignore[misc]
        if self.model_flops is not None:
            batch = batch if replaced is None else replaced
            self.regroup(self, batch, metrics, logging_prefix, self.num_mini_batches)
            self._is_balanced = True
        return replaced

    def _update_actor(self, *args: Any, **kwargs: Any) -> Any:
        if self.model_flops is not None and not self._is_balanced and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s updates its actor with a batch that never went through _balance_batch: groups stay as dispatch cuts"
                " them, which costs sharing and no exactness. Set trainer.balance_batch=True, or call "
                "self._balance_batch(batch, metrics) before old log-probs are computed",
                type(self).__qualname__,
            )
        self._is_balanced = False
        return super()._update_actor(*args, **kwargs)  # type: ignore[misc]


class KeepsGroupsV1(KeepsGroups):
    """Goes in front of a class derived from verl's V1 ``PPOTrainer``."""

    regroup = staticmethod(regroup_v1)

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        # verl compares the mode with "sync" to choose the replay buffer and how checkpoints are taken.
        config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix(TRAINER_PREFIX)
        super().__init__(config, *args, **kwargs)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Hold the tokens that the balance expected against those that the engine has computed, and log the gain."""
        batch = super()._update_actor(batch, metrics)
        engine = "actor/prefix_grouper/"
        if ESTIMATED_TOKENS in metrics and f"{engine}physical_tokens" in metrics:
            computed = float(metrics[f"{engine}physical_tokens"] - metrics[f"{engine}padding_tokens"])
            metrics["prefix_grouper/balance/estimated_over_real_rows"] = metrics[ESTIMATED_TOKENS] / computed
        log_gain(self, metrics)
        return batch


class KeepsGroupsV0(KeepsGroups):
    """Goes in front of a class derived from verl's V0 ``RayPPOTrainer``."""

    regroup = staticmethod(regroup_v0)

    def _balance_batch(self, *args: Any, **kwargs: Any) -> Any:
        with upstream.verls_groups_off(self):
            return super()._balance_batch(*args, **kwargs)


KINDS: dict[str, type[KeepsGroups]] = {
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer": KeepsGroupsV1,
    "verl.trainer.ppo.ray_trainer.RayPPOTrainer": KeepsGroupsV0,
}
