"""Plan the micro-batches of a mini-batch on every rank, together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.batching.micro_batches import MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.engine.layout_forward import Layout
from verl_pg_plugin.engine.ranks import on_every_rank, over_ranks
from verl_pg_plugin.engine.row_selection import select_rows
from verl_pg_plugin.engine.sequences import BatchError, Sequences, read_sequences
from verl_pg_plugin.engine.sharing_modes import lay_out_packed
from verl_pg_plugin.layout import PackedLayout, PrefixOrder, build_prefix_order

LAYOUT_KEY = "prefix_grouper_layout"
"""Non-tensor field of a micro-batch that carries its layout from the plan to the forward."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """Micro-batches of this rank; every rank of the group has as many.

    Attributes:
        micro_batches: rows of the mini-batch, each with its layout under ``LAYOUT_KEY``.
        indices: which rows those are, as verl's ``restore_dynamic_batch`` expects them.
        layouts: one per micro-batch.
    """

    micro_batches: list[TensorDict]
    indices: list[list[int]]
    layouts: list[Layout]


def plan_micro_batches(
    data: TensorDict,
    dp_group: dist.ProcessGroup | None,
    sp_size: int = 1,
    lay_out: Callable[[Sequences], Layout] = lay_out_packed,
) -> MicroBatchPlan:
    """Cut ``data`` into micro-batches by deduplicated cost, with groups whole, and lay each one out.

    Args:
        data: mini-batch in verl's no-padding format, with verl's ``use_dynamic_bsz`` and the limit it selects.
        dp_group: ranks that must run the same number of micro-batches; None for this rank alone.
        sp_size: ranks that share one sequence; multiplies the token budget as in verl.
        lay_out: makes the rows of one micro-batch.

    Raises:
        BatchError: this rank has a batch it cannot compute.
        RankError: another rank has; every rank raises one of the two.
    """
    limits = _limits(data, sp_size)

    def sort() -> tuple[Sequences, PrefixOrder]:
        sequences = read_sequences(data)
        return sequences, build_prefix_order(sequences.tokens, sequences.offsets, sequences.classes)

    sequences, order = on_every_rank(sort, dp_group)
    wanted, indices = 1, on_every_rank(partial(cut_micro_batches, order, limits), dp_group)
    while (counts := set(over_ranks(len(indices), dp_group))) != {wanted}:
        wanted = max(counts)
        indices = on_every_rank(partial(cut_micro_batches, order, limits, at_least=wanted), dp_group)

    def finish() -> MicroBatchPlan:
        layouts = [lay_out(sequences.select(rows)) for rows in indices]
        micro_batches = select_rows(data, indices)
        for micro_batch, layout in zip(micro_batches, layouts, strict=True):
            tu.assign_non_tensor_data(micro_batch, LAYOUT_KEY, layout)
        return MicroBatchPlan(micro_batches=micro_batches, indices=indices, layouts=layouts)

    return on_every_rank(finish, dp_group)


def layout_of(sequences: Sequences, rows: list[int]) -> PackedLayout:
    """Packed layout of some of the sequences, in the order of ``rows``."""
    return lay_out_packed(sequences.select(rows))


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
