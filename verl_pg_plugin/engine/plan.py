"""Plan a mini-batch: read it, cut it into micro-batches, build their layouts, and exchange summaries with other ranks.

Tokens limit a micro-batch, since they fill memory. FLOPs determine the order: ranks wait for each other in every layer,
so each runs its most expensive micro-batches first.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from tensordict import TensorDict

from verl_pg_plugin.engine.batch import (
    check_batch,
    lacks_advantages,
    limits_of,
    normalize_batch,
    old_log_prob_error,
    read_sequences,
)
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
    # Runs before it without gradient. If only other ranks prefill, the shortest forward, since FSDP gathers weights on
    # all ranks together.
    prefill: PackedLayout | None
    level: Level
    shares_tokens: bool  # True if the n-th micro-batch of any rank computes a token for several sequences
    reads_ancestors: bool  # True if attention crosses segments on any rank


@dataclass(frozen=True)
class Plan:
    """A mini-batch of this rank."""

    data: TensorDict  # as ``normalize_batch`` returns it
    sequences: Sequences  # the same as numpy
    micro_batches: list[PlannedMicroBatch]  # in running order; equally many on every rank
    loss_mask_tokens: float  # of all ranks; verl's losses divide by it
    loss_weights: list[float]  # loss tokens of each micro-batch over their mean on all ranks
    num_split_groups: int
    shown: frozenset[Kind]  # image kinds of any rank; every micro-batch runs the vision encoder on each
    policy: ActivationPolicy


_LaidOut: TypeAlias = list[tuple[MicroBatch, Layout]]
"""The micro-batches of a group in running order, with their layouts."""


class _RankSummary(NamedTuple):
    """Summary of a rank's draft for the other ranks; n is the number of micro-batches in a group."""

    costs: list[float]  # for each group the mean FLOPs of a micro-batch with its prefill
    flags: list[np.ndarray]  # for each group (n, 3) in running order: prefills, shares tokens, reads ancestors
    shown: frozenset[Kind]
    loss_mask_tokens: float
    loss_tokens: int
    lacks_advantages: bool


def plan_mini_batch(
    data: TensorDict,
    modality: Modality,
    flops: ModelFlops,
    *,
    packed: bool,
    caches: bool,
    forward_only: bool,
    policy: ActivationPolicy,
    fused_head: bool = False,
    rope_length_limit: int | None = None,
    sp_size: int = 1,
    dp_rank: int = 0,
) -> Plan:
    """Plan a mini-batch together with the other ranks; a collective of the host.

    Args:
        data: mini-batch in verl's no-padding format, with verl's ``use_dynamic_bsz`` and the limit it selects.
        packed: packed mode, else upstream's padded groups.
        caches: chunks of split groups read tokens from each other, and cached tokens count towards the budget.
        policy: with the memory of the rank that has the least.
        fused_head: verl's fused kernels compute the log-probs.
        rope_length_limit: maximum length of a sequence (``architectures.rope_length_limit``).
        sp_size: Ulysses ranks, which share each sequence; multiplies the token budget as in verl.

    A rank with an invalid batch raises ValueError or KeyError, and the others RankError.
    """
    with gather_or_raise() as ranks:
        data = normalize_batch(data)
        check_batch(data, packed, fused_head)
        sequences = read_sequences(data, modality, rope_length_limit)
        order = sequences.order()
        limits = limits_of(data, sp_size)
        weights = cache_weights(policy, limits.budget(order.num_tokens), forward_only) if caches else None
        # verl's losses read the response mask; V1 removes tokens that rollout correction rejects from it only.
        masks = data.get("response_mask", data["loss_mask"])
        loss_tokens = np.array([mask.sum().item() for mask in masks.unbind()])
        has_loss = np.ones_like(loss_tokens) if forward_only else loss_tokens > 0

        def cut(at_least: int) -> list[_LaidOut]:
            groups = cut_for_loss(order, has_loss, limits, weights, at_least, forward_only=forward_only, policy=policy)
            return [_lay_out(group, sequences, packed, forward_only) for group in groups]

        draft = cut(at_least=1)
        of_data = data["loss_mask"].sum().item(), int(loss_tokens.sum()), lacks_advantages(data)
        ranks.append(_summary(draft, flops, sequences, of_data))
    if all(rank.lacks_advantages for rank in ranks):
        raise old_log_prob_error("all advantages are NaN, as if computed from old log-probs before the update")
    numbers = [sum(map(len, rank.flags)) for rank in ranks]
    if min(numbers) < (wanted := max(numbers)):
        with gather_or_raise() as ranks:  # a rank with fewer cuts its mini-batch again
            if sum(map(len, draft)) < wanted:
                draft = cut(wanted)
            ranks.append(_summary(draft, flops, sequences, of_data))

    summaries = ranks[::sp_size]
    planned = _running_order(draft, summaries, dp_rank, sequences, policy, forward_only)
    num_split_groups = sum(len(group) > 1 for group in draft)
    shown = frozenset[Kind]().union(*(rank.shown for rank in summaries))
    masked = sum(rank.loss_mask_tokens for rank in summaries)
    mean = sum(rank.loss_tokens for rank in summaries) / len(summaries) / len(planned)
    loss_weights = [float(loss_tokens[part.sequences].sum()) / mean if mean else 1.0 for part in planned]
    return Plan(data, sequences, planned, masked, loss_weights, num_split_groups, shown, policy)


def _running_order(
    draft: list[_LaidOut],
    ranks: list[_RankSummary],
    own: int,
    sequences: Sequences,
    policy: ActivationPolicy,
    forward_only: bool,
) -> list[PlannedMicroBatch]:
    """Return this rank's micro-batches, most expensive group first, with the flags of all ranks combined."""
    orders = [np.argsort(np.negative(rank.costs), kind="stable").tolist() for rank in ranks]
    flags = [np.concatenate([rank.flags[i] for i in running]) for rank, running in zip(ranks, orders, strict=True)]
    running = [pair for i in orders[own] for pair in draft[i]]
    planned: list[PlannedMicroBatch] = []
    for (micro_batch, layout), (prefills, shares, reads) in zip(running, np.any(flags, axis=0).tolist(), strict=True):
        prefill = layout.prefill
        if prefills and prefill is None:
            prefill = sequences.select(micro_batch.sequences[:1]).build_idle_prefill()
        level = Level.ATTENTION  # without effect in a forward without gradient
        if not forward_only:
            level = policy.choose(layout.num_tokens, len(layout.head_index), **layout.cache_use)
        planned.append(PlannedMicroBatch(micro_batch.sequences, layout, prefill, level, shares, reads))
    return planned


def _lay_out(group: list[MicroBatch], sequences: Sequences, packed: bool, forward_only: bool) -> _LaidOut:
    if packed:
        layouts: list[Layout] = [*build_layouts(group, sequences, forward_only)]
    else:
        selected = (sequences.select(micro_batch.sequences) for micro_batch in group)
        layouts = [build_padded_layout(own.tokens, own.offsets, own.prompt_lengths) for own in selected]
    running = list(zip(group, layouts, strict=True))
    # An update runs the chunks of a split group in reverse: a chunk adds gradients of the cached tokens that it reads.
    return running if forward_only else running[::-1]


def _summary(
    draft: list[_LaidOut], flops: ModelFlops, sequences: Sequences, of_data: tuple[float, int, bool]
) -> _RankSummary:
    costs, flags = [], []
    for group in draft:
        layouts = [layout for _, layout in group]
        # A prefill has no backward, and only updates prefill.
        prefills = [layout.prefill for layout in layouts if layout.prefill is not None]
        flop = FORWARDS_OF_AN_UPDATE * flops.forward(layouts) + flops.forward(prefills)
        costs.append(flop / len(group))
        flags.append(np.array([(lay.prefill is not None, lay.shares_tokens, lay.reads_ancestors) for lay in layouts]))
    shown = frozenset(image.kind for images in sequences.images for image in images)
    return _RankSummary(costs, flags, shown, *of_data)
