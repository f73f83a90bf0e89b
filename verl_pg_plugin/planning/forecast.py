"""What sharing will save on a batch, before anything is run: the micro-batches that the engine makes, priced in FLOPs.

The mini-batch is planned by the function that plans it in a training and laid out as there. A phase's price is the
FLOPs of its tokens, of their (query, key) pairs and of its LM head, each times the passes of the phase, and a fixed
price for every micro-batch. Stock verl is priced alike: every sequence alone, filled into as many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from verl_pg_plugin.layout import IntArray, PackedLayout, build_chunk_layout, build_packed_layout, build_prefix_order
from verl_pg_plugin.planning.activation_level import Level, Levels
from verl_pg_plugin.planning.cost import ModelFlops, visible_pairs
from verl_pg_plugin.planning.memory import WeightBytes, cache_weights
from verl_pg_plugin.planning.micro_batches import (
    MICRO_BATCH_COST,
    MicroBatch,
    MicroBatchLimits,
    cut_micro_batches,
    first_label,
    tokens_of_stock,
)

BACKWARD_OF_PAIRS = 2.5
"""Flash attention's backward in units of its forward: five matrix products for two."""
COMPILED = 1.4
"""Speed of tokens where ``compile_layers`` fuses what lies between the matrices; fitted to docs/data."""
KERNELS = {"flash_attn_2": 1.0, "flash_attn_3": 1.75, "flash_attn_4": 1.75}
"""Speed of attention kernels, that of stock verl being 1; from the same table."""
FIRST_RESPONSE_TOKEN = 2**31
"""Tokens of responses, where only lengths are known: different from each other and from those of prompts."""


@dataclass(frozen=True)
class Batch:
    """B sequences of prompt + response, those of one prompt next to each other.

    Attributes:
        tokens: (N,) of all sequences, one after the other.
        offsets: (B+1,) bounds.
        prompt_lengths: (B,) leading tokens that are the prompt.
    """

    tokens: IntArray
    offsets: IntArray
    prompt_lengths: IntArray

    @classmethod
    def of_prompts(cls, prompts: Sequence[IntArray], responses: Sequence[Sequence[int]]) -> Batch:
        """Responses are known by their lengths, and no two begin with the same token.

        Args:
            prompts: token ids of each of G prompts.
            responses: lengths of the responses to each.

        Raises:
            ValueError: there is no sequence, or an empty prompt or response.
        """
        token = count(FIRST_RESPONSE_TOKEN)
        pairs = [(prompt, n) for prompt, lengths in zip(prompts, responses, strict=True) for n in lengths]
        if not pairs or any(len(prompt) < 1 for prompt, _ in pairs):
            raise ValueError("a batch needs sequences with at least one token of a prompt")
        if any(n < 1 for _, n in pairs):
            raise ValueError("a response has no token")
        lengths = np.array([len(prompt) + n for prompt, n in pairs])
        tokens = np.concatenate([np.append(prompt, np.full(n, next(token))) for prompt, n in pairs])
        return cls(tokens, np.append(0, np.cumsum(lengths)), np.array([len(prompt) for prompt, _ in pairs]))

    @classmethod
    def of_lengths(cls, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> Batch:
        """As ``of_prompts``, with prompts that share nothing with each other."""
        return cls.of_prompts([np.full(length, g) for g, length in enumerate(prompts)], responses)

    @property
    def lengths(self) -> IntArray:
        """(B,) tokens of the sequences."""
        return np.diff(self.offsets)

    def select(self, sequences: list[int]) -> Batch:
        """Some of the sequences, in the order of ``sequences``."""
        bounds = self.offsets.tolist()
        tokens = np.concatenate([self.tokens[bounds[i] : bounds[i + 1]] for i in sequences])
        return Batch(tokens, np.append(0, np.cumsum(self.lengths[sequences])), self.prompt_lengths[sequences])


@dataclass(frozen=True)
class Settings:
    """What of a run's settings its speed depends on.

    Attributes:
        budget: tokens of a micro-batch, of all GPUs that share a sequence.
        carry: ``prefix_grouper.carry=auto``.
        levels: how micro-batches get their activation level; without sizes no memory is predicted.
        compile_layers: whether layers are compiled.
        kernel: of packed mode; stock verl runs flash_attn_2.
    """

    budget: int
    carry: bool = True
    levels: Levels = Levels()  # noqa: RUF009
    compile_layers: bool = True
    kernel: str = "flash_attn_2"


@dataclass(frozen=True)
class Forecast:
    """One budget.

    Attributes:
        budget: of a micro-batch.
        micro_batches: that the update runs, shared.
        logical_tokens, physical_tokens: of the update.
        flop_ratio: FLOPs of every sequence alone over those of the packed tokens, were the batch one micro-batch.
        old_log_prob, update: predicted speed-up; the reference policy's log-probs cost what the old ones do.
        sharing_alone: both speed-ups with layers that are not compiled.
        alone: price of the two phases by stock verl, in FLOPs.
        level: activation level of the micro-batch of the update that takes most.
        kept_gib: what that one keeps on the device for its backward, with what it has cached.
        activation_gib: the same, and the layer that runs backwards.
        host_gib: most that a micro-batch keeps on the host.
    """

    budget: int
    micro_batches: int
    logical_tokens: int
    physical_tokens: int
    flop_ratio: float
    old_log_prob: float
    update: float
    sharing_alone: tuple[float, float]
    alone: tuple[float, float]
    level: Level
    kept_gib: float
    activation_gib: float
    host_gib: float

    @property
    def dedup_ratio(self) -> float:
        """Tokens that each computed one stands for."""
        return self.logical_tokens / self.physical_tokens

    def peak_gib(self, weights: WeightBytes) -> float:
        """Of the update on a device that holds these weights."""
        fixed, head = weights.fixed / 2**30, weights.head / 2**30
        return fixed + max(head + self.kept_gib, self.activation_gib)


@dataclass(frozen=True)
class _Work:
    """One pass: tokens, FLOPs of (query, key) pairs, those of them that the backward runs once more, and the rest.

    ``memory`` in bytes: most of a micro-batch on the device, what it keeps of that, most on the host; and its level.
    """

    tokens: float
    pairs: float
    again: float
    heads: float
    prefills: float
    micro_batches: int
    memory: tuple[float, float, float, Level] = (0.0, 0.0, 0.0, Level.ATTENTION)


def forecast(batch: Batch, flops: ModelFlops, settings: Settings) -> Forecast:
    """Predict one rank's mini-batch.

    Args:
        batch: its sequences.
        flops: of the model.
        settings: of the run.

    Raises:
        ValueError: the budget does not hold the longest sequence.
    """
    plans = plan(batch, settings)
    works = [_shared(batch, groups, flops, settings, forward_only=i == 0) for i, groups in enumerate(plans)]
    alone = [_price(_alone(batch, flops, settings), flops, settings, forward_only) for forward_only in (True, False)]
    packed = build_packed_layout(batch.tokens, batch.offsets, batch.prompt_lengths)
    on_device, kept, on_host, level = works[1].memory
    kernel = KERNELS[settings.kernel]

    def speedups(compiled: bool) -> tuple[float, float]:
        speed = COMPILED if compiled else 1.0
        shared = [_price(work, flops, settings, i == 0, speed, kernel) for i, work in enumerate(works)]
        return alone[0] / shared[0], alone[1] / shared[1]

    old_log_prob, update = speedups(settings.compile_layers)
    return Forecast(
        budget=settings.budget,
        micro_batches=works[1].micro_batches,
        logical_tokens=int(batch.lengths.sum()),
        physical_tokens=int(works[1].tokens),
        flop_ratio=float(flops.alone(batch.lengths).sum() / flops.forward([packed])),
        old_log_prob=old_log_prob,
        update=update,
        sharing_alone=speedups(compiled=False),
        alone=(alone[0], alone[1]),
        level=level,
        kept_gib=kept / 2**30,
        activation_gib=on_device / 2**30,
        host_gib=on_host / 2**30,
    )


def plan(batch: Batch, settings: Settings) -> tuple[list[list[MicroBatch]], ...]:
    """The micro-batches of a forward-only phase and of the update.

    Raises:
        ValueError: the budget does not hold the longest sequence.
    """
    order = build_prefix_order(batch.tokens, batch.offsets)
    limits, levels = MicroBatchLimits(max_tokens=settings.budget), _levels(batch, settings)
    return tuple(
        cut_micro_batches(
            order,
            limits,
            cache_weights(levels, forward_only).times(1 if forward_only else levels.shortage)
            if settings.carry
            else None,
            forward_only=forward_only,
            whole=None if forward_only else levels.whole_groups(),
        )
        for forward_only in (True, False)
    )


def _levels(batch: Batch, settings: Settings) -> Levels:
    return settings.levels.within_stock(tokens_of_stock(batch.lengths, MicroBatchLimits(settings.budget)))


def lay_out(batch: Batch, group: list[MicroBatch], forward_only: bool) -> list[PackedLayout]:
    """The packed tokens of each chunk of a split group, or of one ordinary micro-batch, as the engine lays them out.

    Args:
        batch: that was planned.
        group: micro-batches in forward order.
        forward_only: nothing is prefilled.
    """
    label = first_label(group, batch.prompt_lengths) if group[0].chunk is not None else 0
    layouts = []
    for micro_batch in group:
        part = batch.select(micro_batch.sequences)
        arrays = part.tokens, part.offsets, part.prompt_lengths
        if micro_batch.chunk is None:
            layouts.append(build_packed_layout(*arrays))
        else:
            layouts.append(
                build_chunk_layout(*arrays, chunk=micro_batch.chunk, first_label=label, forward_only=forward_only)
            )
    return layouts


def _alone(batch: Batch, flops: ModelFlops, settings: Settings) -> _Work:
    lengths, tokens = batch.lengths, float(batch.lengths.sum())
    start = np.zeros_like(lengths)
    pairs = float(sum(pair.flops * visible_pairs(start, lengths, pair.window).sum() for pair in flops.pairs))
    return _Work(tokens, pairs, pairs, flops.per_label * tokens, 0.0, -(-int(tokens) // settings.budget))


def _shared(
    batch: Batch, groups: list[list[MicroBatch]], flops: ModelFlops, settings: Settings, forward_only: bool
) -> _Work:
    tokens = pairs = again = heads = prefills = 0.0
    levels, memory = _levels(batch, settings), _Work.memory
    for group in groups:
        for layout in lay_out(batch, group, forward_only):
            chunk = len(layout.head_index), layout.num_cached, len(layout.publish)
            level, of_pairs = levels.choose(layout.num_tokens, *chunk), flops.without_head(layout)
            of_pairs -= flops.per_token * layout.num_tokens
            tokens, pairs = tokens + layout.num_tokens, pairs + of_pairs
            heads += flops.per_label * len(layout.head_index)
            again += 0.0 if level.keeps_attention else of_pairs
            prefills += flops.without_head(layout.prefill) if layout.prefill is not None else 0.0
            if levels.sizes is not None:
                own = layout.num_tokens / levels.ranks
                kept = own * levels.sizes.waiting(level) + levels.sizes.beside(*chunk[1:]) / levels.ranks
                on_device = kept + own * levels.sizes.working(level)
                on_host = max(memory[2], levels.host_bytes(level, layout.num_tokens))
                most = (
                    (on_device, kept, on_host, level) if on_device >= memory[0] else (*memory[:2], on_host, memory[3])
                )
                memory = most
    return _Work(tokens, pairs, again, heads, prefills, sum(map(len, groups)), memory)


def _price(
    work: _Work,
    flops: ModelFlops,
    settings: Settings,
    forward_only: bool,
    token_speed: float = 1.0,
    pair_speed: float = 1.0,
) -> float:
    """FLOPs of a phase, those that run faster than stock verl's counting less."""
    tokens, starts = flops.per_token * work.tokens, MICRO_BATCH_COST * flops.per_token * work.micro_batches
    if forward_only:
        return tokens / token_speed + work.pairs / pair_speed + work.heads + starts
    # With checkpointing layers run once more in the backward; packed mode keeps attention's outputs of most.
    passes = 3 if settings.levels.asked is Level.ALL else 4
    pairs = (1 + BACKWARD_OF_PAIRS) * work.pairs + (work.again if passes == 4 else 0.0)
    return (passes * tokens + work.prefills) / token_speed + passes * starts + pairs / pair_speed + 3 * work.heads
