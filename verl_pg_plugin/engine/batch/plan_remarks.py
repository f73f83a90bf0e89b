"""What an engine says of its plans, once: micro-batches that share nothing, and groups that copied keys cut."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from verl_pg_plugin.engine.batch.micro_batch_plan import MicroBatchPlan

logger = logging.getLogger(__name__)


class PlanRemarks:
    """Remembers what one engine has said."""

    def __init__(self) -> None:
        self._told_of_rmpad = False
        self._looked_for_copies: set[bool] = set()

    def on_rmpad(self, plan: MicroBatchPlan, min_dedup_ratio: float) -> None:
        """Micro-batches that shared less than the user asked for ran as plain rmpad."""
        if 1 < min_dedup_ratio < math.inf and plan.num_rmpad:
            level = logging.DEBUG if self._told_of_rmpad else logging.WARNING
            text = "%d of %d micro-batches ran as plain rmpad: prefix_grouper.min_dedup_ratio=%s"
            logger.log(level, text, plan.num_rmpad, len(plan.micro_batches), min_dedup_ratio)
            self._told_of_rmpad = True

    def on_copies(self, look: Callable[[], str | None], forward_only: bool) -> None:
        """Log what ``look`` finds; it cuts the mini-batch twice more, so each kind of phase looks once."""
        if forward_only in self._looked_for_copies:
            return
        self._looked_for_copies.add(forward_only)
        if told := look():
            logger.warning("%s", told)
            self._looked_for_copies = {True, False}
