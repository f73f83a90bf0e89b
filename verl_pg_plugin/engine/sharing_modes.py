"""The two ways to compute shared prefixes once: packed rows, or upstream's padded groups."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.attention import PackedAttention, VarlenKernel
from verl_pg_plugin.attention.grouped_attention import PaddedGroups
from verl_pg_plugin.attention.ulysses import UlyssesAttention
from verl_pg_plugin.engine.batch.row_shard import RowShard
from verl_pg_plugin.engine.batch.sequences import BatchError, Sequences
from verl_pg_plugin.engine.layout_forward import Layout, LayoutForward
from verl_pg_plugin.layout import PackedLayout, build_packed_layout
from verl_pg_plugin.layout.padded_layout import PaddedLayout, build_padded_layout


class SharingMode(Protocol):
    """What an engine asks of a mode."""

    name: ClassVar[str]

    @property
    def kernel(self) -> VarlenKernel:
        """The attention kernel of this process."""

    def check_batch(self, data: TensorDict) -> None:
        """Raise ``BatchError`` for a mini-batch whose settings the mode does not support."""

    def lay_out(self, sequences: Sequences) -> Layout:
        """Rows of one micro-batch."""

    def num_padding_rows(self, layout: Layout, micro_batch: TensorDict) -> int:
        """Rows that ``forward`` adds to those of the layout."""

    def forward(self, layout: Layout, micro_batch: TensorDict) -> LayoutForward:
        """The layout on the micro-batch's device, with what the attention layers need."""


@dataclass(frozen=True)
class PackedMode:
    """Every shared prefix once and no padding, unless one is asked for.

    Attributes:
        row_multiple: pad rows to a multiple of it (verl's ``pad_to_length_bucket``).
        static_rows: pad rows to the token budget, so that all micro-batches have one shape.
        sp_group: Ulysses group whose ranks share the rows; None for no sequence parallelism.
    """

    name: ClassVar[str] = "packed"
    kernel: VarlenKernel
    row_multiple: int = 1
    static_rows: bool = False
    sp_group: dist.ProcessGroup | None = None

    def check_batch(self, data: TensorDict) -> None:
        if self.static_rows and not tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            raise BatchError(
                "prefix_grouper.static_rows=True pads to the token budget, and use_dynamic_bsz=False has none; set "
                "use_dynamic_bsz=True, or prefix_grouper.static_rows=False"
            )

    def lay_out(self, sequences: Sequences) -> PackedLayout:
        return lay_out_packed(sequences)

    def forward(self, layout: Layout, micro_batch: TensorDict) -> LayoutForward:
        assert isinstance(layout, PackedLayout)
        device = micro_batch["input_ids"].device
        shard = RowShard(layout.num_rows + self.num_padding_rows(layout, micro_batch), self.sp_group)
        attention = PackedAttention.from_layout(layout, self.kernel, device)
        return LayoutForward.from_packed(
            layout,
            attention if self.sp_group is None else UlyssesAttention(attention, shard.num_padded_rows, self.sp_group),
            shard,
            device,
        )

    def num_padding_rows(self, layout: Layout, micro_batch: TensorDict) -> int:
        sp_size = 1 if self.sp_group is None else dist.get_world_size(self.sp_group)
        num_rows = layout.num_rows
        if self.static_rows:
            num_rows = tu.get_non_tensor_data(micro_batch, "max_token_len_per_gpu", default=0) * sp_size
            if num_rows < layout.num_rows:
                raise BatchError(
                    f"prefix_grouper.static_rows=True: {layout.num_rows} rows do not fit max_token_len_per_gpu="
                    f"{num_rows // sp_size}; raise ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu"
                )
        for multiple in (self.row_multiple, sp_size):
            num_rows = -(-num_rows // multiple) * multiple
        return num_rows - layout.num_rows


@dataclass(frozen=True)
class PaddedGroupsMode:
    """Groups as padded lines, ``prefix_grouper.PrefixGrouper`` (https://github.com/johncaged/PrefixGrouper) inside."""

    name: ClassVar[str] = "prefix_grouper"
    kernel: VarlenKernel

    def check_batch(self, data: TensorDict) -> None:
        if tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            raise BatchError(
                "use_dynamic_bsz=True cuts groups by their tokens, which the padded prefix_grouper mode does not "
                "support; set actor_rollout_ref.model.use_remove_padding=True (packed mode) or use_dynamic_bsz=False"
            )

    def lay_out(self, sequences: Sequences) -> PaddedLayout:
        return build_padded_layout(sequences.tokens, sequences.offsets, sequences.prompt_lengths)

    def num_padding_rows(self, layout: Layout, micro_batch: TensorDict) -> int:
        return 0  # lines of a padded layout have their padding

    def forward(self, layout: Layout, micro_batch: TensorDict) -> LayoutForward:
        from prefix_grouper import PrefixGrouper  # needed by this mode alone

        assert isinstance(layout, PaddedLayout)
        device = micro_batch["input_ids"].device
        groups = PaddedGroups(PrefixGrouper(layout.group_info, device=device), self.kernel)
        return LayoutForward.from_padded_groups(layout, groups, device)


def lay_out_packed(sequences: Sequences) -> PackedLayout:
    """The packed rows of some sequences."""
    return build_packed_layout(sequences.tokens, sequences.offsets, sequences.prompt_lengths, sequences.classes)
