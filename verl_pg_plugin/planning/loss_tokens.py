"""Groups without a loss token are computed beside others, where those have room.

Several of verl's losses fail on a micro-batch without one. Such groups are verl's fillers, and those whose every
response is masked.
"""

import numpy as np

from verl_pg_plugin.layout import PrefixOrder
from verl_pg_plugin.planning.activation_policy import ActivationPolicy, CacheWeights
from verl_pg_plugin.planning.micro_batches import SHORT_PREFIX, MicroBatch, MicroBatchLimits, cut_micro_batches


def cut_for_loss(
    order: PrefixOrder,
    has_loss: np.ndarray,
    limits: MicroBatchLimits,
    weights: CacheWeights | None,
    at_least: int = 1,
    *,
    forward_only: bool = False,
    levels: ActivationPolicy = ActivationPolicy(),  # noqa: B008
) -> list[list[MicroBatch]]:
    """``cut_micro_batches``, in which groups without a loss token join others where those have room.

    Neighbours join in runs of an eighth of the limits, by which a micro-batch may exceed them. ``has_loss`` (B,) is by
    index in the mini-batch. ``at_least`` above 1 is what another rank has, and then there are exactly as many.
    """
    most = limits.budget(order.num_tokens)
    group = np.cumsum(order.num_shared <= most // SHORT_PREFIX) - 1
    joins = (np.bincount(group, has_loss[order.sequences]) == 0)[group]
    missing = at_least - np.count_nonzero(~joins)
    joins[np.flatnonzero(joins)[: max(missing, 0)]] = False  # other ranks need a micro-batch for each
    others, joining = (order.subset(np.flatnonzero(places)) for places in (~joins, joins))
    num_tokens = int(joining.num_new.sum())
    is_small = 8 * num_tokens <= most
    number = at_least if is_small or at_least > 1 else -(-int(order.num_new.sum()) // most)
    joined = whole = cut_micro_batches(order, limits, weights, at_least, forward_only=forward_only, levels=levels)

    def lacking(groups: list[list[MicroBatch]]) -> int:
        return sum(not has_loss[part.sequences].any() for group in groups for part in group)

    # A micro-batch without a loss token is worth up to eight more, which make room for what is in it.
    most_wanted = number + 8 * (at_least == 1 and lacking(whole) > 0)
    most_wanted = min(most_wanted, len(others.sequences)) if len(joining.sequences) else 0
    for wanted in range(number, most_wanted + 1):
        cut = cut_micro_batches(others, limits, weights, wanted, forward_only=forward_only, levels=levels)
        joined, exceed = _join(joining, cut, most)
        if is_small or (not exceed and (wanted == number or lacking(joined) < lacking(whole))):
            return joined
    return joined if sum(map(len, whole)) > at_least > 1 else whole  # as many as the other rank needs


def _join(joining: PrefixOrder, groups: list[list[MicroBatch]], most: int) -> tuple[list[list[MicroBatch]], bool]:
    """``groups`` with runs of ``joining`` in the micro-batches that hold least, and whether one then holds too much."""
    parts = [part for group in groups for part in group]
    held, sequences = [part.num_tokens for part in parts], [list(part.sequences) for part in parts]
    run_of = np.cumsum(joining.num_new) * 8 // (most + 1)
    for run in (joining.subset(np.flatnonzero(run_of == run)) for run in np.unique(run_of)):
        fewest = held.index(min(held))
        held[fewest] += int(run.num_new.sum())
        sequences[fewest] += run.sequences.tolist()
    exceed = any(8 * held > 9 * most and held > part.num_tokens for held, part in zip(held, parts, strict=True))
    filled = iter(zip(sequences, held, strict=True))
    return [[MicroBatch(*next(filled), part.chunk) for part in group] for group in groups], exceed
