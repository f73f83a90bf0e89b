"""Plan the micro-batches of a mini-batch on every rank, together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.batching.micro_batches import MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.engine.batch.layout_field import layout_of, set_layout
from verl_pg_plugin.engine.batch.row_selection import select_rows
from verl_pg_plugin.engine.batch.sequences import BatchError, Sequences
from verl_pg_plugin.engine.ranks import on_every_rank, over_ranks
from verl_pg_plugin.layout import Layout, PrefixOrder, build_prefix_order
from verl_pg_plugin.layout.prefix_order import IntArray

if TYPE_CHECKING:
    from verl_pg_plugin.engine.sharing_modes import SharingMode


@dataclass(frozen=True)
class MicroBatchPlan:
    """Micro-batches of this rank; every rank of the group has as many.

    Attributes:
        micro_batches: rows of the mini-batch, each with its layout in it, see ``layout_field``.
        indices: which rows those are, as verl's ``restore_dynamic_batch`` expects them.
    """

    micro_batches: list[TensorDict]
    indices: list[list[int]]

    @property
    def layouts(self) -> list[Layout]:
        """The layout that each micro-batch carries: once it has run, the one it ran with."""
        return [layout_of(micro_batch) for micro_batch in self.micro_batches]

    @property
    def num_rmpad(self) -> int:
        """Micro-batches that run as plain rmpad, since they share nothing or were not let."""
        return sum(not layout.shares_rows for layout in self.layouts)


@dataclass(frozen=True)
class _Cut:
    """Sequences of one micro-batch; its rows come from all of them together, or from each one alone."""

    sequences: list[int]
    num_rows: int
    shared: bool


def plan_micro_batches(
    data: TensorDict,
    dp_group: dist.ProcessGroup | None,
    sp_size: int,
    mode: SharingMode,
    min_dedup_ratio: float = 1.0,
) -> MicroBatchPlan:
    """Cut ``data`` into micro-batches by deduplicated cost, with groups whole, and lay each one out.

    Args:
        data: mini-batch in verl's no-padding format, with verl's ``use_dynamic_bsz`` and the limit it selects.
        dp_group: ranks that must run the same number of micro-batches; None for this rank alone.
        sp_size: ranks that share one sequence; multiplies the token budget as in verl.
        mode: reads the batch and makes the rows of one micro-batch.
        min_dedup_ratio: a micro-batch that would share less (logical over physical tokens) is laid out as plain rmpad,
            cut again where that needs more rows than the limit. Ranks of a sequence-parallel group decide alike, since
            nothing but the mini-batch counts.

    Raises:
        BatchError: this rank has a batch it cannot compute.
        RankError: another rank has; every rank raises one of the two.
    """
    limits = _limits(data, sp_size)

    def sort() -> tuple[Sequences, PrefixOrder]:
        sequences = mode.read(data)
        return sequences, build_prefix_order(sequences.tokens, sequences.offsets, sequences.classes)

    sequences, order = on_every_rank(sort, dp_group)
    cut = partial(_cut, sequences, order, limits, min_dedup_ratio)
    wanted, cuts = 1, on_every_rank(cut, dp_group)
    while (counts := set(over_ranks(len(cuts), dp_group))) != {wanted}:
        wanted = max(counts)
        cuts = on_every_rank(partial(cut, at_least=wanted), dp_group)

    def finish() -> MicroBatchPlan:
        indices = [cut.sequences for cut in cuts]
        micro_batches = select_rows(data, indices)
        for micro_batch, cut in zip(micro_batches, cuts, strict=True):
            rows = sequences.select(cut.sequences)
            set_layout(micro_batch, mode.lay_out(rows if cut.shared else unshared(rows)))
        return MicroBatchPlan(micro_batches=micro_batches, indices=indices)

    return on_every_rank(finish, dp_group)


def unshared(sequences: Sequences) -> Sequences:
    """The same sequences, none of which may share a row with another: packed mode lays them out as plain rmpad."""
    return replace(sequences, classes=np.arange(len(sequences.prompt_lengths)))


def _cut(
    sequences: Sequences, order: PrefixOrder, limits: MicroBatchLimits, min_dedup_ratio: float, at_least: int = 1
) -> list[_Cut]:
    """``cut_micro_batches`` with a gate behind it; micro-batches with most rows first."""
    lengths, place = np.diff(sequences.offsets), np.argsort(order.sequences)
    cuts: list[_Cut] = []
    gated: list[int] = []
    for members in cut_micro_batches(order, limits, at_least):
        num_rows = _num_rows(order, np.sort(place[members]))
        if lengths[members].sum() >= min_dedup_ratio * num_rows:
            cuts.append(_Cut(members, num_rows, shared=True))
        else:
            gated.extend(members)
    if gated:
        # All in one cut: each of them cut alone would leave many half empty.
        alone = unshared(sequences.select(gated))
        order_alone = build_prefix_order(alone.tokens, alone.offsets, alone.classes)
        for part in cut_micro_batches(order_alone, limits, at_least=max(at_least - len(cuts), 1)):
            members = [gated[k] for k in part]
            cuts.append(_Cut(members, int(lengths[members].sum()) - len(members), shared=False))
    return sorted(cuts, key=lambda cut: -cut.num_rows)


def _num_rows(order: PrefixOrder, places: IntArray) -> int:
    """Physical tokens of the sequences at ``places`` of the sorted order, ascending.

    Two sequences share the rows that all neighbours between them share.
    """
    shared = np.minimum.reduceat(order.num_shared[: places[-1] + 1], places[:-1] + 1) if len(places) > 1 else 0
    return int(order.num_rows[places].sum() - np.sum(shared))


def _limits(data: TensorDict, sp_size: int) -> MicroBatchLimits:
    """The limit that verl's flags select; see ``verl.workers.engine.utils.prepare_micro_batches``."""
    if tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
        return MicroBatchLimits(max_rows=_required(data, "max_token_len_per_gpu") * sp_size)
    return MicroBatchLimits(max_sequences=_required(data, "micro_batch_size_per_gpu"))


def _required(data: TensorDict, name: str) -> int:
    limit = tu.get_non_tensor_data(data, name, default=None)
    if limit is None:
        raise BatchError(f"{name} is not set: it bounds the size of a micro-batch")
    return int(limit)
