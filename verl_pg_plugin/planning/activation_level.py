"""Which activation level a micro-batch takes: bytes from sizes, and what is free on the device that has least.

Levels change no bit, so what is free may differ from run to run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_pg_plugin.planning.memory import TokenBytes

DEVICE_RESERVE = 0.08
"""Of a device, left free: gaps between blocks, and what sizes do not say."""
OVER_STOCK = 1.1
"""Of what stock verl takes, the most that is used: torch keeps it, and other processes count on what stock leaves."""


class Level(Enum):
    """What a decoder layer keeps for its backward, and where it waits; gradients are alike to the bit.

    ``ALL``: everything, nothing is computed again. ``ATTENTION``: its inputs, and the output and log-sum-exp of the
    attention kernel. ``INPUTS``: its inputs alone. ``ON_HOST``: what is kept waits in memory of the host.
    """

    ALL = "all"
    ATTENTION = "attention"
    ATTENTION_ON_HOST = "attention_on_host"
    INPUTS = "inputs"
    INPUTS_ON_HOST = "inputs_on_host"

    @property
    def on_host(self) -> bool:
        return self.value.endswith("_on_host")

    @property
    def keeps_attention(self) -> bool:
        return not self.value.startswith("inputs")


@dataclass(frozen=True)
class Room:
    """Bytes that activations may take: on the device, in memory of the host, and what the device keeps in reserve."""

    device: float
    host: float
    reserve: float = 0.0


@dataclass(frozen=True)
class Levels:
    """How micro-batches of a mini-batch get their level."""

    asked: Level | None = None  # of all of them; None to choose
    sizes: TokenBytes | None = None  # None where they are unknown
    room: Room | None = None  # None where nothing limits it, as on a CPU
    host_alone: bool = False  # levels on the host alone are chosen (verl's ``enable_activation_offload``)
    logits_at_once: bool = False  # the LM head holds the logits of all tokens with a label
    fused_kernels: bool = False  # verl's, which hold none, in stock verl too
    ranks: int = 1  # that share the tokens
    stock: float = math.inf  # bytes that stock verl takes of a rank for the mini-batch
    why_asked: str = "as asked"

    @classmethod
    def of_settings(cls, activations: str, checkpointing: Any, **facts: Any) -> Levels:
        """As ``++prefix_grouper.activations`` and verl's ``enable_gradient_checkpointing`` ask."""
        if not checkpointing:
            return cls(**{**facts, "asked": Level.ALL, "why_asked": "without gradient checkpointing"})
        return cls(asked=None if activations == "auto" else Level(activations), **facts)

    @property
    def ladder(self) -> tuple[Level, ...]:
        """From fast to small."""
        on_host = (Level.ATTENTION_ON_HOST, Level.INPUTS_ON_HOST)
        return (self.asked,) if self.asked else on_host if self.host_alone else (Level.ATTENTION, *on_host)

    @property
    def why(self) -> str:
        """For the log."""
        if self.asked or self.sizes is None or self.room is None:
            return self.why_asked if self.asked else "nothing limits it here"
        device, host, stock = (f"{number / 2**30:.1f}" for number in (self.room.device, self.room.host, self.stock))
        return (
            f"++prefix_grouper.activations=auto: {device} GiB for activations on the device that has least, {host} of "
            f"the host for each rank, and no more than {OVER_STOCK} times the {stock} that stock verl takes"
        )

    def within_stock(self, tokens: int) -> Levels:
        """Of a mini-batch of which stock verl's largest micro-batch has so many tokens."""
        if self.sizes is None or self.room is None:
            return self
        return replace(self, stock=tokens / self.ranks * self.sizes.stock(self.fused_kernels))

    @property
    def shortage(self) -> float:
        """What stock verl takes over what there is; 1 where it fits."""
        if self.room is None or math.isinf(self.stock):
            return 1.0
        return max(1.0, self.stock / max(self.room.device + self.room.reserve, 1.0))

    def choose(self, tokens: int, labels: int = 0, **cache_use: int) -> Level:
        """The fastest level that fits; where none does the smallest, since the micro-batch must run.

        All ranks that share them compute ``tokens``, and ``labels`` of the head; ``cache_use`` is the layout's.
        """
        if self.asked or self.sizes is None or self.room is None:
            return self.ladder[0]
        beside = self.beside(labels, **cache_use)
        device = min(self.room.device, OVER_STOCK * self.stock) * self.ranks
        host = self.room.host  # negative where offloaded weights and optimizer states fill it
        levels = [level for level in self.ladder if not level.on_host or self.host_bytes(level, tokens) <= host]
        smallest = levels[-1] if levels and levels[-1].on_host else Level.INPUTS
        return next((level for level in levels if tokens * self.sizes.on_device(level) + beside <= device), smallest)

    def beside(self, labels: int, **cache_use: int) -> int:
        """What a micro-batch takes beside its computed tokens; ``sizes`` are known."""
        assert self.sizes is not None
        return self.sizes.beside(**cache_use) + (labels * self.sizes.logits if self.logits_at_once else 0)

    def host_bytes(self, level: Level, tokens: float) -> float:
        """What a micro-batch of so many tokens keeps on the host of a rank; 0 where sizes are unknown."""
        return tokens * self.sizes.held(level) / self.ranks if self.sizes and level.on_host else 0.0

    def keeps_whole(self, tokens: float, shared: float, longest: float) -> bool:
        """Whether a group above the budget stays whole: within stock verl's memory, or where its split would take more.

        Of splits, one reads the ``shared`` tokens from the chunk that computes them, which holds sums beside them. The
        other computes them in each chunk; it is left where the ``longest`` sequence fits and the group does not. Where
        its split would take more, a group may take more than stock verl.
        """
        sizes, room = self.sizes, self.room
        if sizes is None or room is None:
            return False
        levels = self.ladder if self.asked else (*self.ladder, Level.INPUTS)
        logits = self.logits_at_once * sizes.logits
        sums = sizes.beside(pending=1) / self.ranks
        computed = {level: (sizes.on_device(level) + logits) / self.ranks for level in levels}

        def fitting(number: float, device: float) -> list[Level]:
            """Levels at which so many tokens fit into so many bytes of the device, and on the host."""
            found = (level for level in levels if number <= device / computed[level])
            return [level for level in found if not level.on_host or self.host_bytes(level, number) <= room.host]

        if fitting(tokens, min(room.device, self.stock)):
            return True
        device = room.device + room.reserve
        left = fitting(tokens, device) or ([] if fitting(longest, device) else levels)
        return any(tokens <= (1 + sums / computed[level]) * shared for level in left)
