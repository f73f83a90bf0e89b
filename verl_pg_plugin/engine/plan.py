"""Plan a mini-batch: read it, cut it into micro-batches, lay them out, and agree with the other ranks.

Tokens limit a micro-batch, since they fill memory. FLOPs say when it runs: ranks wait for each other in every layer, so
each runs its micro-batches in an order in which expensive ones meet (``planning.order``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from tensordict import TensorDict

from verl_pg_plugin.engine.batch import Sequences, SequenceSelector, check_batch, limits_of, read_sequences, regular
from verl_pg_plugin.engine.ranks import Agreement
from verl_pg_plugin.layout import Layout, PackedLayout, PrefixOrder
from verl_pg_plugin.modalities import BatchError, Modality
from verl_pg_plugin.planning.activation_level import Level, Levels
from verl_pg_plugin.planning.cost import FORWARDS_OF_AN_UPDATE, ModelFlops
from verl_pg_plugin.planning.micro_batches import (
    MICRO_BATCH_COST,
    CacheWeights,
    MicroBatch,
    MicroBatchLimits,
    cut_micro_batches,
    first_label,
    tokens_of_stock,
)
from verl_pg_plugin.planning.order import FloatArray, align


@dataclass(frozen=True)
class PlannedMicroBatch:
    """One micro-batch of this rank.

    Attributes:
        sequences: which of the mini-batch.
        layout: their tokens.
        prefill: tokens to compute without gradient in front of it; where other ranks prefill and this one need not, a
            forward of the shortest kind, since FSDP gathers weights on all ranks or on none.
        level: what its layers keep for the backward.
        shares_tokens, reads_ancestors: of the layout, or that of any rank that runs beside it.
    """

    sequences: list[int]
    layout: Layout
    prefill: PackedLayout | None
    level: Level
    shares_tokens: bool
    reads_ancestors: bool


@dataclass(frozen=True)
class Plan:
    """A mini-batch of this rank.

    Attributes:
        data: the mini-batch, regular.
        sequences: the same as numbers on the host.
        micro_batches: in the order in which they run; every rank has as many.
        groups: how the planner cut it: the chunks of each split group in forward order, or one ordinary micro-batch.
        runs_encoder: some rank has an image, so every micro-batch runs the vision encoder.
        levels: how micro-batches got their activation level.
    """

    data: TensorDict
    sequences: Sequences
    micro_batches: list[PlannedMicroBatch]
    groups: list[list[MicroBatch]]
    runs_encoder: bool
    levels: Levels = Levels()  # noqa: RUF009

    @property
    def host_bytes(self) -> float:
        """Most that layers of a micro-batch keep on the host of this rank."""
        return max(self.levels.host_bytes(p.level, p.layout.num_tokens) for p in self.micro_batches)

    @cached_property
    def selector(self) -> SequenceSelector:
        """Selects sequences of ``data`` as it is at the first use."""
        return SequenceSelector(self.data)


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others, of each group in its order and each micro-batch in the order in which it runs.

    Attributes:
        costs: (n, 2) of the micro-batches of a group and of the prefills in front of them.
        flags: (n, 3) whether there is a prefill, tokens are shared, ancestors are read.
        needs_encoder: the mini-batch shows an image.
        free: bytes that its device has for activations.
    """

    costs: list[FloatArray]
    flags: list[np.ndarray]
    needs_encoder: bool
    free: float

    @property
    def num_micro_batches(self) -> int:
        return sum(map(len, self.costs))


@dataclass(frozen=True)
class _Draft:
    """Micro-batches of this rank before it knows of the others; ``layouts`` of a group are in running order."""

    groups: list[list[MicroBatch]]
    layouts: list[list[Layout]] = field(default_factory=list)

    def told(self, flops: ModelFlops, needs_encoder: bool, levels: Levels) -> _Told:
        def cost(layout: Layout | None) -> float:
            return 0.0 if layout is None else flops.forward([layout])

        # Where something is prefilled there is a backward, and a prefill has none.
        costs = [
            np.array([[FORWARDS_OF_AN_UPDATE * cost(layout), cost(layout.prefill)] for layout in of_group])
            for of_group in self.layouts
        ]
        flags = [
            np.array([[lay.prefill is not None, lay.shares_tokens, lay.reads_ancestors] for lay in of_group])
            for of_group in self.layouts
        ]
        return _Told(costs, flags, needs_encoder, levels.room.device if levels.room else math.inf)


def plan_mini_batch(
    data: TensorDict,
    modality: Modality,
    flops: ModelFlops,
    *,
    packed: bool,
    weights: CacheWeights | None,
    forward_only: bool,
    fused_head: bool = False,
    sp_size: int = 1,
    dp_rank: int = 0,
    micro_batch_cost: float = MICRO_BATCH_COST,
    levels: Levels = Levels(),  # noqa: B008
) -> Plan:
    """Plan the mini-batches of all ranks; a collective of the host.

    Args:
        data: mini-batch in verl's no-padding format, with verl's ``use_dynamic_bsz`` and the limit it selects.
        modality: of the model.
        flops: what a forward of the model costs.
        packed: packed mode, else upstream's padded groups.
        weights: what cached tokens take of the budget; None where no group is carried from one micro-batch to the next.
        forward_only: there is no backward.
        fused_head: log-probs come from verl's fused kernels.
        sp_size: neighbouring ranks that share each sequence (Ulysses); multiplies the token budget as in verl.
        dp_rank: this rank's place among those that do not.
        micro_batch_cost: fixed cost of a micro-batch, in tokens; decides how short a prefix is worth carrying.
        levels: how a micro-batch gets its activation level, from what is free on this rank; ranks that share tokens
            have the same.

    Raises:
        BatchError: this rank has a batch it cannot compute.
        RankError: another rank has; every rank raises one of the two.
    """
    with Agreement() as ranks:
        data = regular(data)
        check_batch(data, packed, fused_head)
        sequences, limits = read_sequences(data, modality), limits_of(data, sp_size)
        order, stock = sequences.order(), tokens_of_stock(np.diff(sequences.offsets), limits)
        whole = None if forward_only else levels.within_stock(stock)
        if whole is not None:
            weights = weights and weights.times(whole.shortage)

        def drafted(at_least: int) -> _Draft:
            return _draft(sequences, order, limits, weights, at_least, packed, forward_only, micro_batch_cost, whole)

        draft = drafted(1)
        ranks.tell(draft.told(flops, sequences.content.needs_encoder, levels))
    wanted = max(told.num_micro_batches for told in ranks.told)
    if any(told.num_micro_batches < wanted for told in ranks.told):
        with Agreement() as ranks:  # those with fewer have cut theirs again, and their costs differ
            if sum(map(len, draft.groups)) < wanted:
                draft = drafted(wanted)
            ranks.tell(draft.told(flops, sequences.content.needs_encoder, levels))

    told = ranks.told[::sp_size]
    orders = align([rank.costs for rank in told])
    levels = levels.with_free(min(rank.free for rank in ranks.told)).within_stock(stock)
    flags = [np.concatenate([rank.flags[i] for i in running]) for rank, running in zip(told, orders, strict=True)]
    return Plan(
        data=data,
        sequences=sequences,
        micro_batches=_in_order(draft, orders[dp_rank], np.any(flags, axis=0), sequences, forward_only, levels),
        groups=draft.groups,
        runs_encoder=any(rank.needs_encoder for rank in told),
        levels=levels,
    )


def _draft(
    sequences: Sequences,
    order: PrefixOrder,
    limits: MicroBatchLimits,
    weights: CacheWeights | None,
    at_least: int,
    packed: bool,
    forward_only: bool,
    micro_batch_cost: float,
    whole: Levels | None,
) -> _Draft:
    """Cut and lay out a mini-batch, into as many micro-batches as the limits ask for, or ``at_least``."""
    if at_least > len(order.sequences):
        raise BatchError(
            f"this rank has {len(order.sequences)} sequences and another needs {at_least} micro-batches, of which all "
            "ranks must run as many; spread sequences evenly over ranks, or raise ppo_max_token_len_per_gpu and "
            "log_prob_max_token_len_per_gpu"
        )
    groups = cut_micro_batches(
        order,
        limits,
        weights,
        at_least,
        forward_only=forward_only,
        micro_batch_cost=micro_batch_cost,
        whole=whole,
    )
    draft = _Draft(groups)
    for group in groups:
        first = first_label(group, sequences.prompt_lengths) if len(group) > 1 else 0
        layouts: list[Layout] = []
        for micro_batch in group if forward_only else group[::-1]:
            selected = sequences.select(micro_batch.sequences)
            if micro_batch.chunk is None:
                layouts.append(selected.lay_out(packed))
            else:
                layouts.append(selected.lay_out_chunk(micro_batch.chunk, first, forward_only))
        draft.layouts.append(layouts)
    return draft


def _in_order(
    draft: _Draft, running: list[int], flags: np.ndarray, sequences: Sequences, forward_only: bool, levels: Levels
) -> list[PlannedMicroBatch]:
    """The micro-batches of this rank as they run, with what ranks do together (N, 3)."""
    planned: list[PlannedMicroBatch] = []
    for i in running:
        group = draft.groups[i] if forward_only else draft.groups[i][::-1]
        for micro_batch, layout in zip(group, draft.layouts[i], strict=True):
            prefills, shares, reads = flags[len(planned)].tolist()
            prefill = layout.prefill
            if prefills and prefill is None:
                prefill = sequences.select(micro_batch.sequences[:1]).lay_out_idle_prefill()
            chunk = (layout.num_cached, len(layout.publish)) if isinstance(layout, PackedLayout) else ()
            level = Level.ATTENTION  # of a forward without gradient nothing is kept
            if not forward_only:
                level = levels.choose(layout.num_tokens, len(layout.head_index), *chunk)
            planned.append(PlannedMicroBatch(micro_batch.sequences, layout, prefill, level, shares, reads))
    return planned
