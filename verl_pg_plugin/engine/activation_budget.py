"""How many layers each micro-batch of an update keeps: ``prefix_grouper.keep_activations``.

A budget in bytes is spent on whole layers, the last ones first. What a layer holds is measured, not guessed: the first
mini-batch keeps one layer of each kind, and from then on a micro-batch keeps as many as fit with its rows.

``auto`` takes what the device has left. The first update keeps nothing but attention's outputs and shows by how much
an update raises the memory in use. The next one begins when the optimizer has its states; of what is usable then,
a reserve and that rise stay free. A rollout engine wakes up when the update is over, with nothing kept and torch's
cache given back; what it holds while it sleeps is not usable. Where torch's allocator had to give its cache back to go
on, the budget was too large, and half of it is left. Where memory ended and the mini-batch starts over, half as many
layers as were kept are the most from then on.

Ranks decide alike. What they measure meets in ``end``, on the way that a mini-batch's figures take anyway; in
between a decision depends on rows alone. So ranks that share rows (Ulysses) keep the same layers, and the collectives
inside a recomputed layer match. Collectives of FSDP are the same whatever is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_pg_plugin.cost.kept_layers import last_of_each, last_that_fit
from verl_pg_plugin.engine.device_memory import DeviceMemory

logger = logging.getLogger(__name__)

KEEP_ACTIVATIONS = "prefix_grouper.keep_activations"
RESERVE = 0.1
"""Of the device's memory, which ``auto`` leaves free: for gaps between blocks, and what no update has shown yet."""


@dataclass(frozen=True)
class Held:
    """What one rank saw in a mini-batch.

    Attributes:
        kept: of each micro-batch, the places of the layers that it kept, and its rows.
        bytes_per_row: that a layer of each measured kind held.
        before, after: its device, None where unknown.
    """

    kept: tuple[tuple[frozenset[int], int], ...]
    bytes_per_row: dict[tuple[str, ...], float] = field(default_factory=dict)
    before: DeviceMemory | None = None
    after: DeviceMemory | None = None


class ActivationBudget:
    """What one engine may keep, from mini-batch to mini-batch; the same on every rank.

    Attributes:
        asked: "all", "mlp" (every layer too, which then holds less), "auto", or GiB that layers may hold beside what
            checkpointing holds anyway.
        kinds: of each layer, see ``KeptLayers.kinds``.
        bytes_per_row: that a layer of each kind holds, where it was measured.
        stepped: the optimizer has made a step, so it has its states.
    """

    def __init__(self, asked: str | float, kinds: Sequence[tuple[str, ...]]) -> None:
        self.asked = asked
        self.kinds = list(kinds)
        self.bytes_per_row: dict[tuple[str, ...], float] = {}
        self.stepped = False
        self._rise: tuple[float, int] | None = None
        self._left: float | None = None
        self._share = 1.0
        self._most = len(self.kinds)
        self._told = False

    @property
    def unmeasured(self) -> frozenset[int]:
        """The last layer of every kind that no mini-batch has measured."""
        return last_of_each(self.kinds, self.bytes_per_row.__contains__)

    @property
    def wants_rise(self) -> bool:
        """The update that begins is to show by how much an update raises the memory in use."""
        return self.asked == "auto" and self._rise is None

    def begin(self, ranks: Sequence[DeviceMemory | None]) -> None:
        """See what ``auto`` may use of every rank's device, at the start of an update."""
        self._left = None
        if self.asked != "auto" or self._rise is None or not self.stepped:
            return
        known = [memory for memory in ranks if memory is not None]
        if len(known) == len(ranks):
            self._left = min(memory.usable - RESERVE * memory.total for memory in known)

    def layers(self, rows: int) -> frozenset[int]:
        """Places of the layers that a micro-batch of so many rows of this rank keeps."""
        wanted = sorted(self._wanted(rows), reverse=True)
        return frozenset(wanted[: self._most])

    def _wanted(self, rows: int) -> frozenset[int]:
        if self.asked in ("all", "mlp"):
            return frozenset(range(len(self.kinds)))
        budget, probes = self._bytes(rows), self.unmeasured
        if probes:
            return probes if self.asked != "auto" or self._has_room_for(len(probes), budget) else frozenset()
        return last_that_fit([self.bytes_per_row[kind] * rows for kind in self.kinds], budget)

    def held(self, layers: frozenset[int], rows: int) -> float:
        """Bytes that these layers hold; those of a kind that is not measured yet count nothing."""
        return sum(self.bytes_per_row.get(self.kinds[place], 0.0) for place in layers) * rows

    def step_down(self, kept: Sequence[tuple[frozenset[int], int]]) -> None:
        """Keep half as many layers from here on: memory ended with those of these micro-batches, see ``Held.kept``."""
        self._most = max(len(layers) for layers, _ in kept) // 2
        told = "%s=%s: out of memory; the mini-batch starts over, and %d layers at most are kept from here on"
        logger.warning(told, KEEP_ACTIVATIONS, self.asked, self._most)

    def end(self, ranks: Sequence[Held]) -> None:
        """Learn from a mini-batch what every rank saw in it."""
        for rank in ranks:
            for kind, held in rank.bytes_per_row.items():
                self.bytes_per_row[kind] = max(held, self.bytes_per_row.get(kind, 0.0))
        if self.asked != "auto":
            return
        memories = [(rank.before, rank.after) for rank in ranks if rank.before and rank.after]
        if len(memories) < len(ranks):
            return
        kept = any(layers for rank in ranks for layers, _ in rank.kept)
        if self._rise is None:
            self._rise = (
                max(after.peak - before.allocated for before, after in memories),
                min(max(rows for _, rows in rank.kept) for rank in ranks),
            )
        elif kept and any(after.retries > before.retries for before, after in memories):
            self._share /= 2
            logger.warning(
                "%s=auto: torch gave its cache back to find memory in this update; from here on %.0f%% of the budget",
                KEEP_ACTIVATIONS,
                100 * self._share,
            )
        if kept and not self.unmeasured and not self._told and self._left is not None:
            self._told = True
            logger.warning(
                "%s=auto: %.1f GiB for activations (%.1f GiB usable on the fullest device, less %d%% of it and what an "
                "update needs anyway)",
                KEEP_ACTIVATIONS,
                self._bytes(self._rise[1]) / 2**30,
                self._left / 2**30,
                100 * RESERVE,
            )

    def _has_room_for(self, probes: int, budget: float) -> bool:
        """Before anything is measured: the rise of the first update has a layer in it, recomputed beside all inputs."""
        return self._rise is not None and probes * self._rise[0] / 4 <= budget

    def _bytes(self, rows: int) -> float:
        """What a micro-batch of so many rows may hold."""
        if isinstance(self.asked, (int, float)):
            return self.asked * 2**30
        if self._left is None or self._rise is None:
            return 0.0
        rise, rows_then = self._rise
        return self._share * (self._left - rise * max(1.0, rows / rows_then))
