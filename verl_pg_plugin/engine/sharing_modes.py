"""The two ways to compute shared prefixes once: packed rows, or upstream's padded groups."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.attention import PackedAttention, VarlenKernel
from verl_pg_plugin.attention.grouped_attention import PaddedGroups
from verl_pg_plugin.engine.layout_forward import Layout, LayoutForward
from verl_pg_plugin.engine.padded_layout import PaddedLayout, build_padded_layout
from verl_pg_plugin.engine.sequences import BatchError, Sequences
from verl_pg_plugin.layout import PackedLayout, build_packed_layout


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

    def forward(self, layout: Layout, device: torch.device) -> LayoutForward:
        """The layout on the device, with what the attention layers need."""


@dataclass(frozen=True)
class PackedMode:
    """Every shared prefix once and no padding."""

    name: ClassVar[str] = "packed"
    kernel: VarlenKernel

    def check_batch(self, data: TensorDict) -> None:
        """Nothing to object to."""

    def lay_out(self, sequences: Sequences) -> PackedLayout:
        return lay_out_packed(sequences)

    def forward(self, layout: Layout, device: torch.device) -> LayoutForward:
        assert isinstance(layout, PackedLayout)
        attention = PackedAttention.from_layout(layout, self.kernel, device)
        return LayoutForward.from_layout(layout, attention, device)


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

    def forward(self, layout: Layout, device: torch.device) -> LayoutForward:
        from prefix_grouper import PrefixGrouper  # needed by this mode alone

        assert isinstance(layout, PaddedLayout)
        groups = PaddedGroups(PrefixGrouper(layout.group_info, device=device), self.kernel)
        return LayoutForward.from_layout(layout, groups, device)


def lay_out_packed(sequences: Sequences) -> PackedLayout:
    """The packed rows of some sequences."""
    return build_packed_layout(sequences.tokens, sequences.offsets, sequences.prompt_lengths, sequences.classes)
