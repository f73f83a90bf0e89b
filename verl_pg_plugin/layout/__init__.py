"""Pure index maths: token sequences in, rows of one forward out. No verl, no model, no device."""

from verl_pg_plugin.layout.packed_layout import PackedLayout, build_packed_layout
from verl_pg_plugin.layout.padded_layout import PaddedLayout, build_padded_layout
from verl_pg_plugin.layout.prefix_order import PrefixOrder, build_prefix_order
from verl_pg_plugin.layout.protocol import Layout

__all__ = [
    "Layout",
    "PackedLayout",
    "PaddedLayout",
    "PrefixOrder",
    "build_packed_layout",
    "build_padded_layout",
    "build_prefix_order",
]
