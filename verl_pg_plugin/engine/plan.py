"""Plan a mini-batch: read it, cut it into micro-batches, lay them out, and agree with the other ranks.

Tokens limit a micro-batch, since they fill memory. FLOPs say when it runs: ranks wait for each other in every layer, so
each runs its most expensive ones first.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from tensordict import TensorDict

from verl_pg_plugin.engine.batch import check_batch, limits_of, read_sequences, regular
from verl_pg_plugin.engine.ranks import gather_or_raise
from verl_pg_plugin.layout import Layout, PackedLayout, Sequences, build_padded_layout
from verl_pg_plugin.modalities import Kind, Modality
from verl_pg_plugin.planning.activation_level import Level
from verl_pg_plugin.planning.activation_policy import ActivationPolicy, cache_weights
from verl_pg_plugin.planning.cost import FORWARDS_OF_AN_UPDATE, ModelFlops
from verl_pg_plugin.planning.loss_tokens import cut_for_loss
from verl_pg_plugin.planning.micro_batches import MicroBatch, build_layouts


@dataclass(frozen=True)
class PlannedMicroBatch:
    """One micro-batch of this rank; all ranks run their n-th ones at the same time."""

    sequences: list[int]  # indices into the mini-batch, in the order of the layout
    layout: Layout
    # Run in front of it, without gradient. Where only other ranks have something to prefill it is the shortest forward
    # there is: FSDP gathers weights on all ranks or on none.
    prefill: PackedLayout | None
    level: Level
    shares_tokens: bool  # whether the n-th micro-batch of any rank computes a token for several sequences
    reads_ancestors: bool  # whether in that of any rank attention reads other segments


@dataclass(frozen=True)
class Plan:
    """A mini-batch of this rank."""

    data: TensorDict  # regular
    sequences: Sequences  # the same as numbers on the host
    micro_batches: list[PlannedMicroBatch]  # as they run; every rank has as many
    loss_mask_tokens: float  # of all ranks, by which verl's losses scale
    loss_weights: list[float]  # tokens that the loss counts in each micro-batch, over their mean on all ranks
    num_split_groups: int
    shown: frozenset[Kind]  # kinds that some rank has; every micro-batch runs the vision encoder on each
    policy: ActivationPolicy


_LaidOut: TypeAlias = list[tuple[MicroBatch, Layout]]
"""The micro-batches of a group as they run."""


class _RankSummary(NamedTuple):
    """What a rank tells the others; n are the micro-batches of a group."""

    costs: list[float]  # of a group's micro-batches with their prefills, their mean
    flags: list[np.ndarray]  # (n, 3) as they run: whether there is a prefill, tokens are shared, ancestors are read
    shown: frozenset[Kind]
    loss_mask_tokens: float
    loss_tokens: int


def plan_mini_batch(
    data: TensorDict,
    modality: Modality,
    flops: ModelFlops,
    *,
    packed: bool,
    carries: bool,
    forward_only: bool,
    policy: ActivationPolicy,
    fused_head: bool = False,
    rope_length_limit: int | None = None,
    sp_size: int = 1,
    dp_rank: int = 0,
) -> Plan:
    """Plan the mini-batches of all ranks; a collective of the host.

    Args:
        data: mini-batch in verl's no-padding format, with verl's ``use_dynamic_bsz`` and the limit it selects.
        packed: packed mode, else upstream's padded groups.
        carries: chunks of split groups read tokens from each other, which then take a part of the budget.
        policy: with the room of the rank that has least.
        fused_head: whether verl's fused kernels compute the log-probs.
        rope_length_limit: longest that a sequence may be (``architectures.rope_length_limit``).
        sp_size: neighbouring ranks that share each sequence (Ulysses); multiplies the token budget as in verl.
        dp_rank: this rank's place among those that do not.

    Where a rank has a batch that it cannot compute, it raises ValueError and the others RankError.
    """
    with gather_or_raise() as ranks:
        data = regular(data)
        check_batch(data, packed, fused_head)
        sequences = read_sequences(data, modality, rope_length_limit)
        order = sequences.order()
        limits = limits_of(data, sp_size)
        weights = cache_weights(policy, limits.budget(order.num_tokens), forward_only) if carries else None
        # V1 takes what rollout correction rejects out of the response mask alone, which verl's losses read.
        masks = data.get("response_mask", data["loss_mask"])
        loss_tokens = np.array([mask.sum().item() for mask in masks.unbind()])
        has_loss = np.ones_like(loss_tokens) if forward_only else loss_tokens > 0

        def cut(at_least: int) -> list[_LaidOut]:
            groups = cut_for_loss(order, has_loss, limits, weights, at_least, forward_only=forward_only, policy=policy)
            return [_build_layouts(group, sequences, packed, forward_only) for group in groups]

        draft = cut(at_least=1)
        counts = data["loss_mask"].sum().item(), int(loss_tokens.sum())
        ranks.append(_summary(draft, flops, sequences, counts))
    numbers = [sum(map(len, rank.flags)) for rank in ranks]
    if min(numbers) < (wanted := max(numbers)):
        with gather_or_raise() as ranks:  # those with fewer cut theirs again, and their costs differ
            if sum(map(len, draft)) < wanted:
                draft = cut(wanted)
            ranks.append(_summary(draft, flops, sequences, counts))

    summaries = ranks[::sp_size]
    planned = _as_they_run(draft, summaries, dp_rank, sequences, policy, forward_only)
    num_split_groups = sum(len(group) > 1 for group in draft)
    shown = frozenset[Kind]().union(*(rank.shown for rank in summaries))
    masked = sum(rank.loss_mask_tokens for rank in summaries)
    mean = sum(rank.loss_tokens for rank in summaries) / len(summaries) / len(planned)
    loss_weights = [float(loss_tokens[part.sequences].sum()) / mean if mean else 1.0 for part in planned]
    return Plan(data, sequences, planned, masked, loss_weights, num_split_groups, shown, policy)


def _as_they_run(
    draft: list[_LaidOut],
    ranks: list[_RankSummary],
    own: int,
    sequences: Sequences,
    policy: ActivationPolicy,
    forward_only: bool,
) -> list[PlannedMicroBatch]:
    """This rank's micro-batches in the order in which they run, with what any rank has beside each."""
    orders = [np.argsort(np.negative(rank.costs), kind="stable").tolist() for rank in ranks]
    flags = [np.concatenate([rank.flags[i] for i in running]) for rank, running in zip(ranks, orders, strict=True)]
    running = [pair for i in orders[own] for pair in draft[i]]
    planned: list[PlannedMicroBatch] = []
    for (micro_batch, layout), (prefills, shares, reads) in zip(running, np.any(flags, axis=0).tolist(), strict=True):
        prefill = layout.prefill
        if prefills and prefill is None:
            prefill = sequences.select(micro_batch.sequences[:1]).build_idle_prefill()
        level = Level.ATTENTION  # of a forward without gradient nothing is kept
        if not forward_only:
            level = policy.choose(layout.num_tokens, len(layout.head_index), **layout.cache_use)
        planned.append(PlannedMicroBatch(micro_batch.sequences, layout, prefill, level, shares, reads))
    return planned


def _build_layouts(group: list[MicroBatch], sequences: Sequences, packed: bool, forward_only: bool) -> _LaidOut:
    if packed:
        layouts: list[Layout] = [*build_layouts(group, sequences, forward_only)]
    else:
        selected = (sequences.select(micro_batch.sequences) for micro_batch in group)
        layouts = [build_padded_layout(own.tokens, own.offsets, own.prompt_lengths) for own in selected]
    running = list(zip(group, layouts, strict=True))
    # An update runs chunks of a split group from the last: each leaves gradients for those whose tokens it reads.
    return running if forward_only else running[::-1]


def _summary(draft: list[_LaidOut], flops: ModelFlops, sequences: Sequences, counts: tuple[float, int]) -> _RankSummary:
    costs, flags = [], []
    for group in draft:
        layouts = [layout for _, layout in group]
        # Where something is prefilled there is a backward, and a prefill has none.
        prefills = [layout.prefill for layout in layouts if layout.prefill is not None]
        flop = FORWARDS_OF_AN_UPDATE * flops.forward(layouts) + flops.forward(prefills)
        costs.append(flop / len(group))
        flags.append(np.array([(lay.prefill is not None, lay.shares_tokens, lay.reads_ancestors) for lay in layouts]))
    shown = frozenset(image.kind for images in sequences.images for image in images)
    return _RankSummary(costs, flags, shown, *counts)
