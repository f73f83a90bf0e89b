"""Activation level of each micro-batch, and token-budget weights of a split group's tokens.

Both depend on bytes per token and on the free memory of the rank with the least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_pg_plugin.planning.activation_level import Level, MemoryBudget
from verl_pg_plugin.planning.memory import TokenBytes


@dataclass(frozen=True)
class ActivationPolicy:
    """Rule that picks the activation level of each micro-batch."""

    fixed_level: Level | None = None  # used for every micro-batch; None to choose by memory
    sizes: TokenBytes | None = None  # None if the config does not name the sizes
    memory: MemoryBudget | None = None  # None for no limit, as on a CPU
    offload_only: bool = False  # choose among the levels on the host (verl's ``enable_activation_offload``)
    logits_at_once: bool = False  # the LM head holds the logits of all labelled tokens
    ranks: int = 1  # ranks that share the tokens (Ulysses)
    fixed_reason: str = "as configured"  # for the log

    @classmethod
    def of_settings(cls, activations: str, checkpointing: Any, **fields: Any) -> ActivationPolicy:
        """Build from ``++prefix_grouper.activations`` and verl's ``enable_gradient_checkpointing``."""
        if not checkpointing:
            return cls(**{**fields, "fixed_level": Level.ALL, "fixed_reason": "without gradient checkpointing"})
        return cls(fixed_level=None if activations == "auto" else Level(activations), **fields)

    @property
    def ladder(self) -> tuple[Level, ...]:
        """Levels to try, fastest first; ``INPUTS`` is for a host without free memory."""
        if self.fixed_level:
            return (self.fixed_level,)
        ladder = (Level.ATTENTION, Level.ATTENTION_ON_HOST, Level.INPUTS_ON_HOST, Level.INPUTS)
        return ladder[1:] if self.offload_only else ladder

    @property
    def why(self) -> str:
        """Reason for the levels, for the log."""
        if self.fixed_level:
            return self.fixed_reason
        if self.sizes is None or self.memory is None:
            return "no memory limit"
        device, host = (f"{number / 2**30:.1f}" for number in (self.memory.device, self.memory.host))
        return (
            f"++prefix_grouper.activations=auto: {device} GiB for activations on the rank with the least free device "
            f"memory, {host} GiB of host memory per rank"
        )

    def choose(self, tokens: int, labels: int = 0, **cache_use: int) -> Level:
        """Return the fastest level that fits, or the smallest if none does: the micro-batch must run.

        ``tokens`` and ``labels`` count all ranks that share the micro-batch; see ``PackedLayout.cache_use``.
        """
        if self.fixed_level or self.sizes is None or self.memory is None:
            return self.ladder[0]
        return next(self._fitting(tokens, labels, self.memory.device, **cache_use), self.smallest(tokens))

    def keeps_whole(self, tokens: int, longest: int) -> bool:
        """Return True if a group above the token budget fits at some level; False if the sizes are unknown.

        The group may use the reserve if its longest sequence does not fit without it: a split would not help.
        """
        if self.sizes is None or self.memory is None:
            return False
        sequence_fits = any(self._fitting(longest, longest, self.memory.device))
        device = self.memory.device + (0 if sequence_fits else self.memory.reserve)
        return any(self._fitting(tokens, tokens, device))

    def smallest(self, tokens: int) -> Level:
        """Return the level with the least device memory among those that fit the host."""
        assert self.sizes is not None
        return min(self._fitting_host(tokens), key=self.sizes.on_device, default=self.ladder[0])

    def _fitting(self, tokens: int, labels: int, device: float, **cache_use: int) -> Iterator[Level]:
        """Levels that fit ``device`` bytes on each rank, fastest first."""
        assert self.sizes is not None
        left = device * self.ranks - self.sizes.cache_bytes(**cache_use)
        left -= labels * self.sizes.logits if self.logits_at_once else 0
        return (level for level in self._fitting_host(tokens) if tokens * self.sizes.on_device(level) <= left)

    def _fitting_host(self, tokens: int) -> list[Level]:
        """Levels that use no host memory, or fit it; ``memory.host`` may be negative."""
        host = self.memory.host if self.memory else float("inf")
        return [level for level in self.ladder if not level.on_host or self.host_bytes(level, tokens) <= host]

    def host_bytes(self, level: Level, tokens: float) -> float:
        """Host memory of one rank for a micro-batch of ``tokens`` tokens; 0 if the sizes are unknown."""
        return tokens * self.sizes.saved(level) / self.ranks if self.sizes and level.on_host else 0.0


@dataclass(frozen=True)
class CacheWeights:
    """Weights of a split group's tokens in the token budget; see ``cache_weights``."""

    cached: float = 0.0  # a cached token: key and value, and in training their float32 gradient sums
    published: float = 0.0  # a token that later chunks read, or its pending gradients
    alone: float = 1.0  # a token of a one-sequence chunk, which may run at the smallest activation level
    state: float = 0.0  # the recurrent states at one position where a segment continues cached tokens
    computed: float = 1.0  # a token of a chunk of several sequences, which counts at least 1 in total

    def read(self, num_tokens: int, num_states: int = 1) -> float:
        """Weight of ``num_tokens`` cached tokens with the states at ``num_states`` positions among them."""
        return self.cached * num_tokens + self.state * num_states * (num_tokens > 0)

    def hold(self, num_tokens: int) -> float:
        """Weight of ``num_tokens`` published tokens with one state."""
        return self.published * num_tokens + self.state * (num_tokens > 0)


def cache_weights(policy: ActivationPolicy, budget: int, forward_only: bool) -> CacheWeights:
    """Return the weights of a split group's tokens in a ``budget`` of computed tokens.

    With a memory budget, one budget token is worth memory / budget bytes. So a chunk of at most ``budget`` tokens fits
    at the smallest level, with all that it reads and publishes. Without one, a budget token is worth what a computed
    token saves at the chosen level (its inputs, if that level is on the host). Unknown sizes count as if every query
    head had its own key head.
    """
    sizes, memory = policy.sizes, policy.memory
    if sizes is None:
        return CacheWeights(1.0, 1.0, 0.0) if forward_only else CacheWeights(3.0, 2.0)
    level = policy.ladder[0]
    saved = sizes.saved(Level.INPUTS if level.on_host else level)
    if forward_only:  # computed tokens save nothing
        cached = sizes.caching_layers * sizes.key_value / saved
        return CacheWeights(cached, cached, 0.0, sizes.state / saved)
    uses = sizes.cache_bytes(cached=1), sizes.cache_bytes(pending=1), sizes.cache_bytes(states=1)
    if memory is None:
        cached, published, state = (use / saved for use in uses)
        return CacheWeights(cached, published, 1.0 if policy.fixed_level else sizes.saved(Level.INPUTS) / saved, state)
    share = max(memory.device, 1.0) * policy.ranks / budget
    smallest = sizes.on_device(policy.smallest(budget)) + sizes.logits * policy.logits_at_once
    cached, published, state, alone = (use / share for use in (*uses, smallest))
    return CacheWeights(cached, published, alone, state, computed=alone)
