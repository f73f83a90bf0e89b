"""What trainers that keep groups together have in common, whichever of verl's two lines they come from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from omegaconf import DictConfig

from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.trainer.whole_groups import actor_flops

__all__ = ["KeepsGroups", "NumMiniBatches"]

logger = logging.getLogger(__name__)

NumMiniBatches = Callable[[Any, int], int]
"""Optimizer steps that a trainer divides a batch into, from the trainer and the number of sequences."""


class KeepsGroups:
    """Goes in front of a trainer class.

    Attributes:
        model_flops: of the actor, by which groups are balanced; None in a run that shares no prefixes.
    """

    config: DictConfig
    actor_rollout_wg: Any
    model_flops: ModelFlops | None
    num_mini_batches: ClassVar[NumMiniBatches]
    _is_balanced = False
    _has_warned = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Before any worker starts, so that what cannot be priced fails at once.
        self.model_flops = actor_flops(self.config) if mode_of(self.config).shares_prefixes else None

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
