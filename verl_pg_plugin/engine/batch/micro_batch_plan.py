"""Plan the micro-batches of a mini-batch on every rank, together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from tensordict import TensorDict

from verl_pg_plugin.batching.lockstep import align
from verl_pg_plugin.batching.runs import FloatArray
from verl_pg_plugin.cost.flops import FORWARDS_OF_AN_UPDATE
from verl_pg_plugin.engine.batch.layout_field import (
    layout_of,
    set_export,
    set_idle_tower,
    set_layout,
    set_recompute_attention,
)
from verl_pg_plugin.engine.batch.lazy_micro_batches import LazyMicroBatches
from verl_pg_plugin.engine.batch.limits import limits_of
from verl_pg_plugin.engine.batch.row_selection import RowSelector
from verl_pg_plugin.engine.batch.sequences import BatchError, Sequences, lay_out_carried, lay_out_idle_export
from verl_pg_plugin.engine.ranks import on_every_rank, over_ranks
from verl_pg_plugin.layout import Layout, PackedLayout, PrefixOrder
from verl_pg_plugin.planning.micro_batches import (
    MICRO_BATCH_COST,
    CacheWeights,
    MicroBatch,
    MicroBatchLimits,
    cut_micro_batches,
    first_label,
)

if TYPE_CHECKING:
    from verl_pg_plugin.engine.sharing_modes import SharingMode


@dataclass(frozen=True)
class CarryPolicy:
    """How groups that exceed a micro-batch are carried from one to the next.

    Attributes:
        weights: what carried rows take of the budget.
        forward_only: there is no backward, so parts run in forward order and nothing is exported.
        part_cost: fixed cost of a micro-batch, in rows; decides how small a prefix is worth carrying.
    """

    weights: CacheWeights
    forward_only: bool
    part_cost: float = MICRO_BATCH_COST


@dataclass(frozen=True)
class MicroBatchPlan:
    """Micro-batches of this rank; every rank of the group has as many.

    Attributes:
        micro_batches: rows of the mini-batch, each with its layout in it, see ``layout_field``.
        indices: which rows those are, as verl's ``restore_dynamic_batch`` expects them.
        chains: the parts of groups that exceed a micro-batch, in forward order.
        exported_rows: rows computed once more without gradient.
        sequences: the mini-batch, by which ``indices`` count.
    """

    micro_batches: LazyMicroBatches
    indices: list[list[int]]
    chains: list[list[MicroBatch]]
    exported_rows: int
    sequences: Sequences

    @property
    def layouts(self) -> list[Layout]:
        """The layout that each micro-batch carries: once it has run, the one it ran with."""
        return [layout_of(micro_batch) for micro_batch in self.micro_batches]

    @property
    def num_prompt_groups(self) -> int:
        """Different prompts of each micro-batch, added up."""
        return sum(len(set(self.sequences.prompt_groups[members].tolist())) for members in self.indices)

    @property
    def num_rows_of_groups(self) -> int:
        """Rows, were every prompt of the mini-batch computed once and nothing shared but whole prompts."""
        _, first = np.unique(self.sequences.prompt_groups, return_index=True)
        lengths, prompts = np.diff(self.sequences.offsets), self.sequences.prompt_lengths
        return int((lengths - prompts).sum() + (prompts[first] - 1).sum())

    @property
    def num_rmpad(self) -> int:
        """Micro-batches that run as plain rmpad, since they share nothing or were not let."""
        return sum(not layout.shares_tokens for layout in self.layouts)

    @property
    def carried_rows(self) -> int:
        """Rows that a micro-batch reads and another one owns."""
        return sum(part.chunk.num_cached for chain in self.chains for part in chain if part.chunk)


@dataclass(frozen=True)
class _Cut:
    """Parts of one chain in forward order, or one ordinary micro-batch.

    Attributes:
        parts: of the chain.
        shared: whether its sequences share rows.
    """

    parts: list[MicroBatch]
    shared: bool = True


def plan_micro_batches(
    data: TensorDict,
    dp_group: dist.ProcessGroup | None,
    sp_size: int,
    mode: SharingMode,
    min_dedup_ratio: float = 1.0,
    carry: CarryPolicy | None = None,
    price: Callable[[Layout], float] = lambda layout: layout.num_tokens,
) -> MicroBatchPlan:
    """Cut ``data`` into micro-batches by the rows they compute, with groups whole, and lay each one out.

    Rows limit them, since rows are what fills memory. Their cost decides when they run, see ``batching.lockstep``.

    Args:
        data: mini-batch in verl's no-padding format, with verl's ``use_dynamic_bsz`` and the limit it selects.
        dp_group: ranks that must run the same number of micro-batches; None for this rank alone.
        sp_size: ranks that share one sequence; multiplies the token budget as in verl.
        mode: reads the batch and makes the rows of one micro-batch.
        min_dedup_ratio: a micro-batch that would share less (logical over physical tokens) is laid out as plain rmpad,
            cut again where that needs more rows than the limit. Ranks of a sequence-parallel group decide alike, since
            nothing but the mini-batch counts.
        carry: how groups above the limit go on in the next micro-batch; None to compute what they share again.
        price: of a forward of a micro-batch, in any unit.

    Raises:
        BatchError: this rank has a batch it cannot compute.
        RankError: another rank has; every rank raises one of the two.
    """

    def sort() -> tuple[Sequences, PrefixOrder, MicroBatchLimits]:
        sequences, limits = mode.read(data), limits_of(data, sp_size)
        return sequences, sequences.order(), limits

    sequences, order, limits = on_every_rank(sort, dp_group)
    cut = partial(_cut, sequences, order, limits, min_dedup_ratio, carry)
    cuts = on_every_rank(cut, dp_group)
    while len(counts := set(over_ranks(sum(len(cut.parts) for cut in cuts), dp_group))) > 1:
        wanted = max(counts)
        on_every_rank(partial(_check_can_fill, order, wanted), dp_group)
        cuts = on_every_rank(partial(cut, at_least=wanted), dp_group)

    backward = carry is not None and not carry.forward_only

    def lay_out() -> tuple[list[list[Layout]], list[FloatArray]]:
        layouts = [_lay_out(sequences, cut, mode, backward) for cut in cuts]
        return layouts, [_costs(of_cut, price) for of_cut in layouts]

    laid_out, costs = on_every_rank(lay_out, dp_group)
    costs_of_ranks = over_ranks(costs, dp_group)

    def put_in_order() -> tuple[list[MicroBatch], list[Layout], list[PackedLayout | None]]:
        running = align(costs_of_ranks)[0 if dp_group is None else dist.get_rank(dp_group)]
        parts = [part for i in running for part in (cuts[i].parts[::-1] if backward else cuts[i].parts)]
        layouts = [layout for i in running for layout in laid_out[i]]
        return parts, layouts, [layout.prefill for layout in layouts]

    parts, layouts, exports = on_every_rank(put_in_order, dp_group)
    # FSDP gathers weights on all ranks or on none, so all export where one does.
    exporting = np.any(over_ranks([export is not None for export in exports], dp_group), axis=0)
    # The same holds for a tower, and for the last micro-batch, which reduces the gradients of all.
    tower_is_idle = not any(over_ranks(sequences.content.needs_tower, dp_group))

    def finish() -> MicroBatchPlan:
        indices = [part.sequences for part in parts]
        selector = RowSelector(data)

        def micro_batch(k: int) -> TensorDict:
            rows = selector.select(indices[k])
            set_layout(rows, layouts[k])
            if tower_is_idle:
                set_idle_tower(rows)
            if parts[k].recompute_attention:
                set_recompute_attention(rows)
            if exporting[k]:
                set_export(rows, exports[k] or lay_out_idle_export(sequences.select(indices[k][:1])))
            return rows

        chains = [cut.parts for cut in cuts if len(cut.parts) > 1]
        exported = sum(export.num_tokens for export in exports if export is not None)
        micro_batches = LazyMicroBatches(micro_batch, len(parts))
        return MicroBatchPlan(micro_batches, indices, chains, exported, sequences)

    return on_every_rank(finish, dp_group)


def _check_can_fill(order: PrefixOrder, wanted: int) -> None:
    if len(order.sequences) < wanted:
        raise BatchError(
            f"this rank has {len(order.sequences)} sequences and another needs {wanted} micro-batches, of which all "
            "ranks must run as many; spread sequences evenly over ranks, or raise ppo_max_token_len_per_gpu and "
            "log_prob_max_token_len_per_gpu"
        )


def _lay_out(sequences: Sequences, cut: _Cut, mode: SharingMode, backward: bool) -> list[Layout]:
    """Layouts of a cut's parts in the order in which they run."""
    if len(cut.parts) == 1:
        rows = sequences.select(cut.parts[0].sequences)
        return [mode.lay_out(rows if cut.shared else unshared(rows))]
    label = first_label(cut.parts, sequences.prompt_lengths)
    layouts: list[Layout] = [
        lay_out_carried(sequences.select(part.sequences), part.chunk, label, forward_only=not backward)
        for part in cut.parts
        if part.chunk
    ]
    return layouts[::-1] if backward else layouts


def _costs(layouts: list[Layout], price: Callable[[Layout], float]) -> FloatArray:
    """(n, 2) of a cut's micro-batches and of the exports in front of them, in the order in which they run."""
    forwards = [[price(layout), price(layout.prefill) if layout.prefill else 0.0] for layout in layouts]
    # Where something is exported there is a backward, and an export has none.
    return np.array(forwards) * (FORWARDS_OF_AN_UPDATE, 1.0)


def unshared(sequences: Sequences) -> Sequences:
    """The same sequences, none of which may share a row with another: packed mode lays them out as plain rmpad."""
    return replace(sequences, classes=np.arange(len(sequences.prompt_lengths)))


def _cut(
    sequences: Sequences,
    order: PrefixOrder,
    limits: MicroBatchLimits,
    min_dedup_ratio: float,
    carry: CarryPolicy | None,
    at_least: int = 1,
) -> list[_Cut]:
    """Chains and micro-batches, with a gate behind them."""
    lengths = np.diff(sequences.offsets)
    cuts: list[_Cut] = []
    gated: list[int] = []
    for parts in _chains(order, limits, carry, at_least):
        members = [s for part in parts for s in part.sequences]
        if lengths[members].sum() >= min_dedup_ratio * sum(part.num_tokens for part in parts):
            cuts.append(_Cut(parts))
        else:
            gated.extend(members)
    if gated:
        # All in one cut: each of them cut alone would leave many half empty.
        alone = unshared(sequences.select(gated))
        order_alone = alone.order()
        wanted = max(at_least - sum(len(cut.parts) for cut in cuts), 1)
        for (part,) in cut_micro_batches(order_alone, limits, at_least=wanted):
            cuts.append(_Cut([replace(part, sequences=[gated[k] for k in part.sequences])], shared=False))
    return cuts


def _chains(
    order: PrefixOrder, limits: MicroBatchLimits, carry: CarryPolicy | None, at_least: int
) -> list[list[MicroBatch]]:
    if carry is None:
        return cut_micro_batches(order, limits, at_least=at_least)
    return cut_micro_batches(
        order, limits, carry.weights, at_least, forward_only=carry.forward_only, micro_batch_cost=carry.part_cost
    )
