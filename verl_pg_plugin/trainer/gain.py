"""What sharing saved, in the log of a run: a line for each step, and one for all of them behind the last."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["log_gain"]

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # verl's own level hides what is no warning

LOGICAL = "actor/prefix_grouper/logical_tokens"
PHYSICAL = "actor/prefix_grouper/physical_tokens"


def log_gain(trainer: Any, metrics: Mapping[str, Any]) -> None:
    """Log what the engines of a step counted, and at the last step what they counted in all steps of this process.

    The numbers are tokens of a mini-batch, as in the metrics; no seconds, which nobody measures without sharing.

    Args:
        trainer: of verl's, V1 or V0; keeps the sums as ``gained_tokens``.
        metrics: of an update, by verl's names; values are numbers or one for each rank or mini-batch. One that shared
            nothing logs nothing.
    """
    if LOGICAL not in metrics or PHYSICAL not in metrics:
        return
    logical, computed = (float(np.mean(metrics[name])) for name in (LOGICAL, PHYSICAL))
    step, total = getattr(trainer, "global_steps", 0), getattr(trainer, "total_training_steps", None)
    logger.info("step %d/%s: %s", step, total or "?", _in_words(logical, computed))
    all_logical, all_computed = getattr(trainer, "gained_tokens", (0.0, 0.0))
    trainer.gained_tokens = all_logical + logical, all_computed + computed
    if total and step >= total:
        logger.info("shared prefixes, mean over the run: %s", _in_words(*trainer.gained_tokens))


def _in_words(logical: float, computed: float) -> str:
    return f"{1 - computed / logical:.1%} of tokens not computed, dedup ratio {logical / computed:.2f}"
