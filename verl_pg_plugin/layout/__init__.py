"""Pure index maths: token sequences in, rows of one packed forward out. No verl, no model, no device."""

from verl_pg_plugin.layout.packed_layout import PackedLayout, build_packed_layout
from verl_pg_plugin.layout.prefix_order import PrefixOrder, build_prefix_order

__all__ = ["PackedLayout", "PrefixOrder", "build_packed_layout", "build_prefix_order"]
