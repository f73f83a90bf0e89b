"""What sharing will save on a batch, before anything is run: the cuts that the engine makes, priced in FLOPs.

The mini-batch is cut by the functions that cut it in a training and laid out as there. A phase's price is the FLOPs of
its rows, of their (query, key) pairs and of its head, each times the passes of the phase, and a fixed price for every
micro-batch. Stock verl is priced alike: every sequence alone, filled into as many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.cost.kept_layers import KeptBudget
from verl_pg_plugin.cost.pairs import visible_pairs
from verl_pg_plugin.layout import (
    IntArray,
    PackedLayout,
    PrefixOrder,
    build_chunk_layout,
    build_packed_layout,
    build_prefix_order,
)
from verl_pg_plugin.planning.memory import TokenMemory
from verl_pg_plugin.planning.micro_batches import (
    MICRO_BATCH_COST,
    MicroBatch,
    MicroBatchLimits,
    cut_micro_batches,
    first_label,
)

__all__ = ["Batch", "Forecast", "Settings", "forecast", "lay_out_chain"]

BACKWARD_OF_PAIRS = 2.5
"""Flash attention's backward in units of its forward: five matrix products for two."""
COMPILED = 1.4
"""Speed of rows where ``compile_layers`` fuses what lies between the matrices; fitted by scripts/cost_accuracy.py."""
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
        tokens = count(FIRST_RESPONSE_TOKEN)
        rows = [
            np.concatenate([prompt, np.full(length, next(tokens))])
            for prompt, lengths in zip(prompts, responses, strict=True)
            for length in lengths
        ]
        prompt_lengths = np.array([len(p) for p, lengths in zip(prompts, responses, strict=True) for _ in lengths])
        if not rows or min(map(len, rows)) == 0 or prompt_lengths.min() < 1:
            raise ValueError("a batch needs sequences with at least one token of a prompt")
        lengths = np.array([len(row) for row in rows])
        if (lengths <= prompt_lengths).any():
            raise ValueError("a response has no token")
        return cls(np.concatenate(rows), np.append(0, np.cumsum(lengths)), prompt_lengths)

    @classmethod
    def of_lengths(cls, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> Batch:
        """As ``of_prompts``, with prompts that share nothing with each other."""
        return cls.of_prompts([np.full(length, g) for g, length in enumerate(prompts)], responses)

    @classmethod
    def of_order(cls, order: PrefixOrder, prompt_lengths: IntArray) -> Batch:
        """Sequences of which is known how many rows each shares with one before it, and nothing else.

        Args:
            order: of B sequences; what a sequence does not share it has alone.
            prompt_lengths: (B,) tokens of their prompts, as numbered in ``order.sequences``.
        """
        sequences: list[IntArray] = []
        for num_tokens, num_shared in zip(order.num_tokens.tolist(), order.num_shared.tolist(), strict=True):
            tokens = np.full(num_tokens + 1, FIRST_RESPONSE_TOKEN + len(sequences))
            if num_shared:  # a row reads a token and predicts the next
                long_enough = (before for before in reversed(sequences) if len(before) > num_shared)
                shared = next(long_enough, sequences[-1])[: num_shared + 1]
                tokens[: len(shared)] = shared
            sequences.append(tokens)
        offsets = np.append(0, np.cumsum([len(tokens) for tokens in sequences]))
        return cls(np.concatenate(sequences), offsets, prompt_lengths[order.sequences])

    @property
    def lengths(self) -> IntArray:
        """(B,) tokens of the sequences."""
        return np.diff(self.offsets)

    def select(self, rows: list[int]) -> Batch:
        """Some of the sequences, in the order of ``rows``."""
        bounds, lengths = self.offsets.tolist(), self.lengths[rows]
        tokens = np.concatenate([self.tokens[bounds[row] : bounds[row + 1]] for row in rows])
        return Batch(tokens, np.append(0, np.cumsum(lengths)), self.prompt_lengths[rows])


@dataclass(frozen=True)
class Settings:
    """What of a run's settings its speed depends on.

    Attributes:
        budget: tokens of a micro-batch, of all GPUs that share a sequence.
        carry: ``prefix_grouper.carry=auto``.
        checkpointing: ``enable_gradient_checkpointing``.
        recompute_attention: option of packed mode.
        compile_layers: whether its layers are compiled, which is what the option's default comes to on a GPU for the
            types that are tested.
        kernel: of packed mode; stock verl runs flash_attn_2.
        kept: what whole layers keep of an update (``keep_activations``), under gradient checkpointing; None for
            attention's outputs alone.
    """

    budget: int
    carry: bool = True
    checkpointing: bool = True
    recompute_attention: bool = False
    compile_layers: bool = True
    kernel: str = "flash_attn_2"
    kept: KeptBudget | None = None


@dataclass(frozen=True)
class Forecast:
    """One budget.

    Attributes:
        budget: of a micro-batch.
        micro_batches: that the update runs, shared.
        logical_tokens, physical_tokens: of the update.
        flop_bound: FLOPs of every sequence alone over those of the shared rows, were the batch one micro-batch.
        old_log_prob, update: predicted speed-up; the reference policy's log-probs cost what the old ones do.
        alone: price of the two phases by stock verl, in FLOPs.
        activation_gib: what the largest micro-batch of the update keeps for its backward, kept layers included and its
            logits not counted.
    """

    budget: int
    micro_batches: int
    logical_tokens: int
    physical_tokens: int
    flop_bound: float
    old_log_prob: float
    update: float
    alone: tuple[float, float]
    activation_gib: float

    @property
    def dedup_ratio(self) -> float:
        """Tokens that each computed row stands for."""
        return self.logical_tokens / self.physical_tokens


@dataclass(frozen=True)
class _Work:
    """Rows, FLOPs of (query, key) pairs and of heads, in one pass.

    Attributes:
        again: of the pairs, FLOPs that the backward runs once more.
        kept: rows that it need not run once more, by the share of the layers that keep them.
        held: bytes of that, in the micro-batch with most.
    """

    rows: float = 0.0
    pairs: float = 0.0
    heads: float = 0.0
    again: float = 0.0
    exported: float = 0.0
    micro_batches: int = 0
    kept: float = 0.0
    held: int = 0


def forecast(batch: Batch, flops: ModelFlops, memory: TokenMemory, settings: Settings) -> Forecast:
    """Predict one rank's mini-batch.

    Args:
        batch: its sequences.
        flops: of the model.
        memory: of its rows, with the same gradient checkpointing.
        settings: of the run.
    """
    order = build_prefix_order(batch.tokens, batch.offsets)
    stock = _alone(batch, flops, settings)
    shared = {}
    for forward_only in (True, False):
        weights = memory.weights(forward_only) if settings.carry else None
        chains = cut_micro_batches(order, MicroBatchLimits(settings.budget), weights, forward_only=forward_only)
        shared[forward_only] = _shared(batch, chains, flops, settings, forward_only)
    packed = build_packed_layout(batch.tokens, batch.offsets, batch.prompt_lengths)
    prices = {
        forward_only: (
            _price(stock, flops, settings, forward_only, stock_verl=True),
            _price(work, flops, settings, forward_only, stock_verl=False),
        )
        for forward_only, work in shared.items()
    }
    return Forecast(
        budget=settings.budget,
        micro_batches=shared[False].micro_batches,
        logical_tokens=int(batch.lengths.sum()),
        physical_tokens=int(shared[False].rows),
        flop_bound=float(flops.alone(batch.lengths).sum() / flops.forward([packed])),
        old_log_prob=prices[True][0] / prices[True][1],
        update=prices[False][0] / prices[False][1],
        alone=(prices[True][0], prices[False][0]),
        activation_gib=(min(settings.budget, shared[False].rows) * memory.activations + shared[False].held) / 2**30,
    )


def _alone(batch: Batch, flops: ModelFlops, settings: Settings) -> _Work:
    lengths = batch.lengths
    tokens = float(lengths.sum())
    pairs = sum(pair.flops * visible_pairs(np.zeros_like(lengths), lengths, pair.window).sum() for pair in flops.pairs)
    micro_batches = -(-int(tokens) // settings.budget)
    heads = flops.per_head_row * tokens
    return _Work(tokens, float(pairs), heads, again=float(pairs), micro_batches=micro_batches)


def _shared(
    batch: Batch, chains: list[list[MicroBatch]], flops: ModelFlops, settings: Settings, forward_only: bool
) -> _Work:
    rows = pairs = heads = again = exported = kept = 0.0
    held = 0
    for chain in chains:
        for part, layout in zip(chain, lay_out_chain(batch, chain, forward_only), strict=True):
            of_pairs = flops.trunk(layout) - flops.per_row * layout.num_tokens
            rows, pairs = rows + layout.num_tokens, pairs + of_pairs
            heads += flops.per_head_row * len(layout.head_index)
            again += of_pairs if settings.recompute_attention or part.recompute_attention else 0.0
            exported += flops.trunk(layout.prefill) if layout.prefill is not None else 0.0
            if settings.kept is not None and not part.recompute_attention:  # a part that does is short of room
                kept += layout.num_tokens * settings.kept.layers(layout.num_tokens) / settings.kept.num_layers
                held = max(held, settings.kept.held(layout.num_tokens))
    micro_batches = sum(map(len, chains))
    return _Work(rows, pairs, heads, again, exported=exported, micro_batches=micro_batches, kept=kept, held=held)


def lay_out_chain(batch: Batch, chain: list[MicroBatch], forward_only: bool) -> list[PackedLayout]:
    """The rows of each part of a chain, or of one ordinary micro-batch, as the engine lays them out.

    Args:
        batch: of which the parts are.
        chain: parts in forward order.
        forward_only: nothing is exported.
    """
    parts = [batch.select(part.sequences) for part in chain]
    if len(chain) == 1:
        return [build_packed_layout(rows.tokens, rows.offsets, rows.prompt_lengths) for rows in parts]
    label = first_label(chain, batch.prompt_lengths)
    return [
        build_chunk_layout(
            rows.tokens,
            rows.offsets,
            rows.prompt_lengths,
            chunk=part.chunk,
            first_label=label,
            forward_only=forward_only,
        )
        for part, rows in zip(chain, parts, strict=True)
    ]


def _price(work: _Work, flops: ModelFlops, settings: Settings, forward_only: bool, stock_verl: bool) -> float:
    """FLOPs of a phase, those that run faster than stock verl's counting less."""
    rows = flops.per_row * work.rows
    row_speed = COMPILED if settings.compile_layers and not stock_verl else 1.0
    pair_speed = 1.0 if stock_verl else KERNELS[settings.kernel]
    per_part = MICRO_BATCH_COST * flops.per_row * work.micro_batches
    if forward_only:
        return rows / row_speed + work.pairs / pair_speed + work.heads + per_part
    # With checkpointing layers run once more in the backward; packed mode keeps attention's outputs of most.
    passes = 4 if settings.checkpointing else 3
    kept = flops.per_row * work.kept if settings.checkpointing else 0.0
    pairs = (1 + BACKWARD_OF_PAIRS) * work.pairs + (work.again if settings.checkpointing else 0.0)
    rows = (passes * rows - kept + work.exported) / row_speed
    return rows + passes * per_part + pairs / pair_speed + 3 * work.heads
