"""What sharing will save on a batch, before anything is run: the micro-batches that the engine makes, priced in FLOPs.

The mini-batch is planned by the function that plans it in a training and laid out as there. Stock verl is priced alike:
every sequence alone, filled into as many tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from verl_pg_plugin.layout import FloatArray, IntArray, PackedLayout, Sequences
from verl_pg_plugin.planning.activation_level import Level, Levels
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.planning.memory import WeightBytes, cache_weights
from verl_pg_plugin.planning.micro_batches import (
    MICRO_BATCH_COST,
    MicroBatchLimits,
    cut_micro_batches,
    lay_out,
    tokens_of_stock,
)

BACKWARD_OF_PAIRS = 2.5
"""Flash attention's backward in units of its forward: five matrix products for two."""
COMPILED = 1.5
"""Speed of tokens where ``compile_layers`` fuses what lies between the matrices, fitted to cases of docs/data."""
KERNEL_SPEEDS = {"flash_attn_2": 1.0, "flash_attn_3": 1.85, "flash_attn_4": 1.85}
"""Speed of attention kernels, stock verl's being 1; from the same table, where 3 counts as 4."""


def batch_of_prompts(prompts: Sequence[IntArray], responses: Sequence[Sequence[int]]) -> Sequences:
    """Token ids of each of G prompts, and lengths of the responses to each; no two begin with the same token."""
    pairs = [(prompt, n) for prompt, lengths in zip(prompts, responses, strict=True) for n in lengths]
    if not pairs or any(len(prompt) < 1 or n < 1 for prompt, n in pairs):
        raise ValueError("a batch needs sequences with at least one token of a prompt and one of a response")
    of_prompts = np.array([len(prompt) for prompt, _ in pairs])
    offsets = np.append(0, np.cumsum(of_prompts + [n for _, n in pairs]))
    # Tokens of responses, of which only lengths are known, differ from each other and from those of prompts.
    tokens = [np.append(prompt, np.full(n, token)) for token, (prompt, n) in enumerate(pairs, 2**31)]
    return Sequences(np.concatenate(tokens), offsets, of_prompts)


def batch_of_lengths(prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> Sequences:
    """As ``batch_of_prompts``, with prompts that share nothing with each other."""
    return batch_of_prompts([np.full(length, g) for g, length in enumerate(prompts)], responses)


@dataclass(frozen=True)
class Forecast:
    """One budget."""

    budget: int
    micro_batches: int  # of the update, as the next two
    logical_tokens: int
    physical_tokens: int
    flop_ratio: float  # FLOPs of every sequence alone over those of the packed tokens, were the batch one micro-batch
    old_log_prob: float  # predicted speed-up; the reference policy's log-probs cost what the old ones do
    update: float  # predicted speed-up
    sharing_alone: float  # of the update, with layers that are not compiled
    alone: tuple[float, float]  # price of the two phases by stock verl, in FLOPs
    level: Level  # of the micro-batch of the update that takes most
    kept_gib: float  # what that one keeps on the device for its backward, with what it has cached
    activation_gib: float  # the same, and the layer that runs backwards
    host_gib: float  # most that a micro-batch keeps on the host

    @property
    def dedup_ratio(self) -> float:
        """Tokens that each computed one stands for."""
        return self.logical_tokens / self.physical_tokens

    def peak_gib(self, weights: WeightBytes) -> float:
        """Of the update on a device that holds these weights."""
        fixed, head = weights.fixed / 2**30, weights.head / 2**30
        return fixed + max(head + self.kept_gib, self.activation_gib)


def forecast(
    batch: Sequences,
    flops: ModelFlops,
    levels: Levels,
    budget: int,
    *,
    carry: bool = True,
    compile_layers: bool = True,
    kernel: str = "flash_attn_2",
) -> Forecast:
    """Predict one rank's mini-batch under a budget of tokens of all GPUs that share a sequence.

    ``levels`` have sizes. ``compile_layers`` and ``kernel`` are packed mode's: stock verl runs flash_attn_2, and
    compiles nothing. ValueError where the budget does not hold the longest sequence.
    """
    order = batch.order()
    limits = MicroBatchLimits(budget)
    tokens = int(batch.lengths.sum())
    levels = levels.within_stock(tokens_of_stock(batch.lengths, limits))
    sizes = levels.sizes
    assert sizes is not None
    # With checkpointing layers run once more in the backward; packed mode keeps attention's outputs of most.
    passes = 3 if levels.asked is Level.ALL else 4

    def price(
        forward_only: bool, tokens: int, pairs: float, labels: int, micro_batches: int = 1, attends_again: bool = False
    ) -> FloatArray:
        """FLOPs (3,) of a phase: those that compiled layers speed up, those that the kernel does, and the rest."""
        body, head = flops.per_token * tokens, flops.per_label * labels
        starts = MICRO_BATCH_COST * flops.per_token * micro_batches
        if forward_only:
            return np.array([body, pairs, head + starts])
        of_pairs = 1 + BACKWARD_OF_PAIRS + attends_again
        return np.array([passes * body, of_pairs * pairs, 3 * head + passes * starts])

    pairs = float(flops.attention(np.zeros_like(batch.lengths), batch.lengths).sum())
    alone, shared, updates = [], [], []
    for forward_only in (True, False):
        micro_batches = -(-tokens // budget)
        alone.append(float(price(forward_only, tokens, pairs, tokens, micro_batches, passes == 4).sum()))
        weights = cache_weights(levels, forward_only) if carry else None
        of_phase = replace(levels, room=None) if forward_only else levels  # no layer keeps anything for a backward
        groups = cut_micro_batches(order, limits, weights, forward_only=forward_only, levels=of_phase)
        priced = np.zeros(3)
        for layout in chain.from_iterable(lay_out(group, batch, forward_only) for group in groups):
            labels = len(layout.head_index)
            seen = float(flops.attention(*layout.segments).sum())
            level = levels.choose(layout.num_tokens, labels, **layout.cache_use)
            priced += price(forward_only, layout.num_tokens, seen, labels, attends_again=not level.keeps_attention)
            if layout.prefill is not None:
                priced[0] += flops.without_head(layout.prefill)
            if not forward_only:
                updates.append((layout, level))
        shared.append(priced)

    def speedups(compiled: bool) -> tuple[float, float]:
        speeds = np.array([COMPILED if compiled else 1.0, KERNEL_SPEEDS[kernel], 1.0])
        old_log_prob, update = (float(a / (b / speeds).sum()) for a, b in zip(alone, shared, strict=True))
        return old_log_prob, update

    def kept(layout: PackedLayout, level: Level) -> float:
        beside = levels.beside(len(layout.head_index), **layout.cache_use)
        return (layout.num_tokens * sizes.waiting(level) + beside) / levels.ranks

    def peak(layout: PackedLayout, level: Level) -> float:
        return kept(layout, level) + layout.num_tokens * sizes.working(level) / levels.ranks

    old_log_prob, update = speedups(compile_layers)
    layout, level = max(updates, key=lambda update: peak(*update))
    return Forecast(
        budget=budget,
        micro_batches=len(updates),
        logical_tokens=tokens,
        physical_tokens=sum(layout.num_tokens for layout, _ in updates),
        flop_ratio=float(flops.alone(batch.lengths).sum() / flops.forward([batch.lay_out()])),
        old_log_prob=old_log_prob,
        update=update,
        sharing_alone=speedups(compiled=False)[1],
        alone=(alone[0], alone[1]),
        level=level,
        kept_gib=kept(layout, level) / 2**30,
        activation_gib=peak(layout, level) / 2**30,
        host_gib=max(levels.host_bytes(level, layout.num_tokens) for layout, level in updates) / 2**30,
    )
