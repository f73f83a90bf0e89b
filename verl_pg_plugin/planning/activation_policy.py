"""Which activation level a micro-batch takes, and what tokens of a split group take of the token budget.

Both follow from bytes of a token, and from what is free on the device that has least. Levels change no bit, so what is
free may differ from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_pg_plugin.planning.activation_level import Level, MemoryBudget
from verl_pg_plugin.planning.memory import TokenBytes


@dataclass(frozen=True)
class ActivationPolicy:
    """How micro-batches of a mini-batch get their level."""

    asked: Level | None = None  # of all of them; None to choose
    sizes: TokenBytes | None = None  # None where they are unknown
    room: MemoryBudget | None = None  # None where nothing limits it, as on a CPU
    host_alone: bool = False  # levels on the host alone are chosen (verl's ``enable_activation_offload``)
    logits_at_once: bool = False  # the LM head holds the logits of all tokens with a label
    ranks: int = 1  # that share the tokens
    why_asked: str = "as asked"

    @classmethod
    def of_settings(cls, activations: str, checkpointing: Any, **facts: Any) -> ActivationPolicy:
        """As ``++prefix_grouper.activations`` and verl's ``enable_gradient_checkpointing`` ask."""
        if not checkpointing:
            return cls(**{**facts, "asked": Level.ALL, "why_asked": "without gradient checkpointing"})
        return cls(asked=None if activations == "auto" else Level(activations), **facts)

    @property
    def ladder(self) -> tuple[Level, ...]:
        """From fast to small; ``INPUTS`` is for a host without room."""
        if self.asked:
            return (self.asked,)
        ladder = (Level.ATTENTION, Level.ATTENTION_ON_HOST, Level.INPUTS_ON_HOST, Level.INPUTS)
        return ladder[1:] if self.host_alone else ladder

    @property
    def why(self) -> str:
        """For the log."""
        if self.asked or self.sizes is None or self.room is None:
            return self.why_asked if self.asked else "nothing limits it here"
        device, host = (f"{number / 2**30:.1f}" for number in (self.room.device, self.room.host))
        return (
            f"++prefix_grouper.activations=auto: {device} GiB for activations on the device that has least, and {host} "
            "of the host for each rank"
        )

    def choose(self, tokens: int, labels: int = 0, **cache_use: int) -> Level:
        """Return the fastest level that fits; where none does the smallest, since the micro-batch must run.

        Args:
            tokens, labels: that all ranks that share the micro-batch compute, and run the LM head on.
            cache_use: see ``PackedLayout.cache_use``.
        """
        if self.asked or self.sizes is None or self.room is None:
            return self.ladder[0]
        return next(self._fitting(tokens, labels, self.room.device, **cache_use), self.smallest(tokens))

    def keeps_whole(self, tokens: int, longest: int) -> bool:
        """Return True if a group above the token budget fits at some level; False where bytes are unknown.

        A split of a group whose ``longest`` sequence does not fit would not fit either, so it may take the reserve.
        """
        if self.sizes is None or self.room is None:
            return False
        sequence_fits = any(self._fitting(longest, longest, self.room.device))
        device = self.room.device + (0 if sequence_fits else self.room.reserve)
        return any(self._fitting(tokens, tokens, device))

    def smallest(self, tokens: int) -> Level:
        """Return the level that takes least of the device, of those for which the host has room; bytes are known."""
        assert self.sizes is not None
        return min(self._held_by_host(tokens), key=self.sizes.on_device, default=self.ladder[0])

    def _fitting(self, tokens: int, labels: int, device: float, **cache_use: int) -> Iterator[Level]:
        """Levels at which a micro-batch fits into so many bytes of each rank, from fast to small."""
        assert self.sizes is not None
        left = device * self.ranks - self.sizes.beside(**cache_use)
        left -= labels * self.sizes.logits if self.logits_at_once else 0
        return (level for level in self._held_by_host(tokens) if tokens * self.sizes.on_device(level) <= left)

    def _held_by_host(self, tokens: int) -> list[Level]:
        """Levels that keep nothing on the host, or as much as it has room for; ``room.host`` may be negative."""
        if self.room is None:
            return list(self.ladder)
        host = self.room.host
        return [level for level in self.ladder if not level.on_host or self.host_bytes(level, tokens) <= host]

    def host_bytes(self, level: Level, tokens: float) -> float:
        """What a micro-batch of so many tokens keeps on the host of a rank; 0 where sizes are unknown."""
        return tokens * self.sizes.held(level) / self.ranks if self.sizes and level.on_host else 0.0


@dataclass(frozen=True)
class CacheWeights:
    """What a token of a split group takes of the token budget, see ``cache_weights``."""

    cached: float = 0.0  # one that is read: its keys and values, and in training the sums of their gradients
    published: float = 0.0  # one that later chunks read, or its pending gradients
    alone: float = 1.0  # one that a chunk of one sequence computes, which may run at the smallest activation level
    state: float = 0.0  # not a token, but what recurrent layers hold where a chunk goes on behind cached tokens
    computed: float = 1.0  # one that a chunk of several sequences computes; it takes at least 1 without the others

    def read(self, num_tokens: int, num_states: int = 1) -> float:
        """What so many cached tokens take, with states behind some of them: where sequences part, and at their end."""
        return self.cached * num_tokens + self.state * num_states * (num_tokens > 0)

    def hold(self, num_tokens: int) -> float:
        """The same of published ones, with one state."""
        return self.published * num_tokens + self.state * (num_tokens > 0)


def cache_weights(levels: ActivationPolicy, budget: int, forward_only: bool) -> CacheWeights:
    """What tokens of a split group take of a ``budget`` of computed tokens.

    With a measured room, a token of the budget is worth room / budget bytes: a chunk computes at most so many tokens,
    and fits at the smallest level with all that it reads and publishes. Elsewhere it is worth what a computed token
    keeps at the level that is taken, on the host its inputs. Unknown sizes count as if every query had its own key.
    """
    sizes, room = levels.sizes, levels.room
    if sizes is None:
        return CacheWeights(1.0, 1.0, 0.0) if forward_only else CacheWeights(3.0, 2.0)
    level = levels.ladder[0]
    computed = sizes.held(Level.INPUTS if level.on_host else level)
    if forward_only:  # nothing is kept of a computed token
        cached = sizes.caching_layers * sizes.key_value / computed
        return CacheWeights(cached, cached, 0.0, sizes.state / computed)
    uses = sizes.beside(cached=1), sizes.beside(pending=1), sizes.beside(states=1)
    if room is None:
        cached, published, state = (use / computed for use in uses)
        return CacheWeights(cached, published, 1.0 if levels.asked else sizes.held(Level.INPUTS) / computed, state)
    share = max(room.device, 1.0) * levels.ranks / budget
    smallest = sizes.on_device(levels.smallest(budget)) + sizes.logits * levels.logits_at_once
    cached, published, state, alone = (use / share for use in (*uses, smallest))
    return CacheWeights(cached, published, alone, state, computed=alone)
