"""The two ways to compute shared prefixes once: packed rows, or upstream's padded groups."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.attention.carried_rows import CarriedRows, Carrying
from verl_pg_plugin.attention.kernels.selection import VarlenKernel
from verl_pg_plugin.attention.packed_rows import PackedRows
from verl_pg_plugin.attention.padded_groups import PaddedGroups
from verl_pg_plugin.attention.ulysses import UlyssesRows
from verl_pg_plugin.engine.batch.layout_field import runs_tower
from verl_pg_plugin.engine.batch.row_shard import RowShard
from verl_pg_plugin.engine.batch.sequences import BatchError, Sequences, lay_out_packed, read_sequences
from verl_pg_plugin.engine.forward_rows import ForwardRows
from verl_pg_plugin.layout import Layout, PackedLayout, PaddedLayout, build_padded_layout
from verl_pg_plugin.modalities import Modality
from verl_pg_plugin.modalities.text import TEXT

L = TypeVar("L", bound=Layout)


@dataclass(frozen=True, kw_only=True)
class SharingMode(ABC, Generic[L]):
    """What an engine asks of a mode.

    Attributes:
        name: for logs and metrics.
        head_takes_jobs: whether the head may be told to compute log-probs itself; one with a job takes the rows it is
            given, and columns of padded groups hold others too.
        kernel: the attention kernel of this process.
        modality: what the model reads.
        static_rows: pad rows to the token budget, so that all micro-batches have one shape.
        carries: whether groups that exceed a micro-batch go on in the next.
    """

    name: ClassVar[str]
    head_takes_jobs: ClassVar[bool]
    carries: ClassVar[bool]
    kernel: VarlenKernel
    modality: Modality = TEXT
    static_rows: bool = False

    def read(self, data: TensorDict) -> Sequences:
        """The sequences of a batch; raises ``BatchError`` for one that it cannot read."""
        return read_sequences(data, self.modality)

    @property
    def sp_size(self) -> int:
        """Ranks that share the rows of a micro-batch (Ulysses sequence parallelism)."""
        return 1

    @abstractmethod
    def check_batch(self, data: TensorDict) -> None:
        """Raise ``BatchError`` for a mini-batch whose settings the mode does not support."""

    @abstractmethod
    def lay_out(self, sequences: Sequences) -> L:
        """Rows of one micro-batch."""

    @abstractmethod
    def num_padding_rows(self, layout: L, micro_batch: TensorDict) -> int:
        """Rows that ``to_device`` adds to those of the layout."""

    @abstractmethod
    def to_device(self, layout: L, micro_batch: TensorDict, carrying: Carrying | None = None) -> ForwardRows:
        """The layout on the micro-batch's device, with what the layers that mix tokens need.

        Args:
            carrying: rows of other micro-batches, where ``layout`` is a part of a chain.
        """


@dataclass(frozen=True, kw_only=True)
class PackedMode(SharingMode[PackedLayout]):
    """Every shared prefix once and no padding, unless one is asked for.

    Attributes:
        row_multiple: pad rows to a multiple of it (verl's ``pad_to_length_bucket``).
        sp_group: Ulysses group whose ranks share the rows; None for no sequence parallelism.
    """

    name: ClassVar[str] = "packed"
    head_takes_jobs: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    row_multiple: int = 1
    sp_group: dist.ProcessGroup | None = None

    @property
    def sp_size(self) -> int:
        return 1 if self.sp_group is None else dist.get_world_size(self.sp_group)

    def check_batch(self, data: TensorDict) -> None:
        if self.static_rows and not tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            raise BatchError(
                "prefix_grouper.static_rows=True pads to the token budget, and use_dynamic_bsz=False has none; set "
                "use_dynamic_bsz=True, or ++prefix_grouper.static_rows=False"
            )

    def lay_out(self, sequences: Sequences) -> PackedLayout:
        return lay_out_packed(sequences)

    def to_device(self, layout: PackedLayout, micro_batch: TensorDict, carrying: Carrying | None = None) -> ForwardRows:
        device = micro_batch["input_ids"].device
        # An export is no micro-batch: padded to the budget it would cost as much as one.
        padding = replace(self, static_rows=False) if carrying is not None and carrying.is_export else self
        shard = RowShard(layout.num_tokens + padding.num_padding_rows(layout, micro_batch), self.sp_group)
        rows = (
            PackedRows.from_layout(layout, self.kernel, device)
            if carrying is None
            else CarriedRows.carry(carrying, self.kernel, device)
        )
        shared = rows if self.sp_group is None else UlyssesRows(rows, shard.num_padded_rows, self.sp_group)
        content = self.modality.inputs(layout, micro_batch, runs_tower(micro_batch))
        return ForwardRows.from_packed(layout, shared, shard, device, carrying, content)

    def num_padding_rows(self, layout: PackedLayout, micro_batch: TensorDict) -> int:
        num_rows = layout.num_tokens + self.modality.num_padding_rows(layout, runs_tower(micro_batch))
        if self.static_rows:
            num_rows = tu.get_non_tensor_data(micro_batch, "max_token_len_per_gpu", default=0) * self.sp_size
            if num_rows < layout.num_tokens:
                raise BatchError(
                    f"prefix_grouper.static_rows=True: {layout.num_tokens} rows do not fit max_token_len_per_gpu="
                    f"{num_rows // self.sp_size}; raise ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu"
                )
            num_rows += self.modality.num_reserved_rows
        for multiple in (self.row_multiple, self.sp_size):
            num_rows = -(-num_rows // multiple) * multiple
        return num_rows - layout.num_tokens


@dataclass(frozen=True, kw_only=True)
class PaddedGroupsMode(SharingMode[PaddedLayout]):
    """Groups as padded lines, ``prefix_grouper.PrefixGrouper`` (https://github.com/johncaged/PrefixGrouper) inside."""

    name: ClassVar[str] = "prefix_grouper"
    head_takes_jobs: ClassVar[bool] = False
    carries: ClassVar[bool] = False

    def check_batch(self, data: TensorDict) -> None:
        if tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            raise BatchError(
                "use_dynamic_bsz=True cuts groups by their tokens, which the padded prefix_grouper mode does not "
                "support; set actor_rollout_ref.model.use_remove_padding=True (packed mode) or use_dynamic_bsz=False"
            )

    def lay_out(self, sequences: Sequences) -> PaddedLayout:
        return build_padded_layout(sequences.tokens, sequences.offsets, sequences.prompt_lengths)

    def num_padding_rows(self, layout: PaddedLayout, micro_batch: TensorDict) -> int:
        return 0  # lines of a padded layout have their padding

    def to_device(self, layout: PaddedLayout, micro_batch: TensorDict, carrying: Carrying | None = None) -> ForwardRows:
        from prefix_grouper import PrefixGrouper  # needed by this mode alone

        device = micro_batch["input_ids"].device
        groups = PaddedGroups(PrefixGrouper(layout.group_info, device=device), self.kernel, layout)
        return ForwardRows.from_padded_groups(layout, groups, device)
