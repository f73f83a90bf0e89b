"""Merge groups without loss tokens into other micro-batches.

Several of verl's losses fail on a micro-batch without loss tokens. Such groups are verl's padding, and groups in which
every response is masked.
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
    policy: ActivationPolicy = ActivationPolicy(),  # noqa: B008
) -> list[list[MicroBatch]]:
    """Return ``cut_micro_batches`` with groups without loss tokens merged into other micro-batches that have room.

    Groups move in runs of up to an eighth of the token budget; a micro-batch may exceed the budget by as much.
    ``has_loss`` is (B,) bool by index in the mini-batch. ``at_least`` above 1 is exact: another rank has as many.
    """
    most = limits.budget(order.num_tokens)
    group = np.cumsum(order.num_shared <= most // SHORT_PREFIX) - 1
    joins = (np.bincount(group, has_loss[order.sequences]) == 0)[group]
    missing = at_least - np.count_nonzero(~joins)
    joins[np.flatnonzero(joins)[: max(missing, 0)]] = False  # one micro-batch for each of the other rank's
    others, joining = (order.subset(np.flatnonzero(places)) for places in (~joins, joins))
    num_tokens = int(joining.num_new.sum())
    is_small = 8 * num_tokens <= most
    number = at_least if is_small or at_least > 1 else -(-int(order.num_new.sum()) // most)
    joined = whole = cut_micro_batches(order, limits, weights, at_least, forward_only=forward_only, policy=policy)

    def lacking(groups: list[list[MicroBatch]]) -> int:
        return sum(not has_loss[part.sequences].any() for group in groups for part in group)

    # To avoid a micro-batch without loss tokens, up to eight more micro-batches are tried, which have more room.
    most_wanted = number + 8 * (at_least == 1 and lacking(whole) > 0)
    most_wanted = min(most_wanted, len(others.sequences)) if len(joining.sequences) else 0
    for wanted in range(number, most_wanted + 1):
        cut = cut_micro_batches(others, limits, weights, wanted, forward_only=forward_only, policy=policy)
        joined, exceed = _join(joining, cut, most)
        if is_small or (not exceed and (wanted == number or lacking(joined) < lacking(whole))):
            return joined
    return joined if sum(map(len, whole)) > at_least > 1 else whole  # exactly as many as the other rank


def _join(joining: PrefixOrder, groups: list[list[MicroBatch]], most: int) -> tuple[list[list[MicroBatch]], bool]:
    """Return ``groups`` with runs of ``joining`` added to the smallest micro-batches, and whether one is too large."""
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
