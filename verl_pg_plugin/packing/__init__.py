"""Packing of GRPO samples into rows of one fixed length, and per-segment sums over such rows."""

from verl_pg_plugin.packing.rows import create_pack_group, pack_grouped_data, pack_grpo_data, pad_sequence_to_length
from verl_pg_plugin.packing.segment_sum import batch_unsorted_segment_sum

__all__ = [
    "batch_unsorted_segment_sum",
    "create_pack_group",
    "pack_grouped_data",
    "pack_grpo_data",
    "pad_sequence_to_length",
]
