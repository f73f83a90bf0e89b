"""Packing of GRPO samples into rows of one fixed length, and per-segment sums over such rows."""

from verl_pg_plugin.packing.grpo import pack_grpo_data
from verl_pg_plugin.packing.pack_group import create_pack_group
from verl_pg_plugin.packing.packed_rows import pack_grouped_data, pad_sequence_to_length
from verl_pg_plugin.packing.segment_sum import batch_unsorted_segment_sum

__all__ = [
    "batch_unsorted_segment_sum",
    "create_pack_group",
    "pack_grouped_data",
    "pack_grpo_data",
    "pad_sequence_to_length",
]
