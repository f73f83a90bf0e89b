"""Index arrays of packed and padded forwards, in numpy: no verl, no model, no device."""

from typing import TypeAlias

from verl_pg_plugin.layout.order import FloatArray, IntArray, PrefixOrder, build_prefix_order, counted
from verl_pg_plugin.layout.packed import Chunk, PackedLayout, build_packed_layout, share_states
from verl_pg_plugin.layout.padded import PaddedLayout, build_padded_layout
from verl_pg_plugin.layout.sequences import Sequences

Layout: TypeAlias = PackedLayout | PaddedLayout

__all__ = [
    "Chunk",
    "FloatArray",
    "IntArray",
    "Layout",
    "PackedLayout",
    "PaddedLayout",
    "PrefixOrder",
    "Sequences",
    "build_packed_layout",
    "build_padded_layout",
    "build_prefix_order",
    "counted",
    "share_states",
]
