"""The layout of a micro-batch travels inside it, from the plan to the forward."""

from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.layout import Layout, PackedLayout

LAYOUT_KEY = "prefix_grouper_layout"
EXPORT_KEY = "prefix_grouper_export"
RECOMPUTE_KEY = "prefix_grouper_recompute_attention"
IDLE_TOWER_KEY = "prefix_grouper_idle_tower"
"""Non-tensor fields of a micro-batch."""


def layout_of(micro_batch: TensorDict) -> Any:
    """The layout that a micro-batch carries: once it has run, the one it ran with; None if nobody planned it."""
    return tu.get_non_tensor_data(micro_batch, LAYOUT_KEY, default=None)


def set_layout(micro_batch: TensorDict, layout: Layout) -> None:
    """Give a micro-batch its layout."""
    tu.assign_non_tensor_data(micro_batch, LAYOUT_KEY, layout)


def export_of(micro_batch: TensorDict) -> PackedLayout | None:
    """Rows to compute without gradient before a micro-batch."""
    return tu.get_non_tensor_data(micro_batch, EXPORT_KEY, default=None)


def set_export(micro_batch: TensorDict, layout: PackedLayout) -> None:
    """Have rows computed without gradient before a micro-batch."""
    tu.assign_non_tensor_data(micro_batch, EXPORT_KEY, layout)


def recomputes_attention(micro_batch: TensorDict) -> bool:
    """Whether a micro-batch has room for what it is owed only if its backward runs attention again."""
    return tu.get_non_tensor_data(micro_batch, RECOMPUTE_KEY, default=False)


def set_recompute_attention(micro_batch: TensorDict) -> None:
    """Have a micro-batch keep nothing of attention for its backward."""
    tu.assign_non_tensor_data(micro_batch, RECOMPUTE_KEY, True)


def runs_tower(micro_batch: TensorDict) -> bool:
    """Whether the model's tower runs even if this rank has nothing for it: always where nobody has planned."""
    return not tu.get_non_tensor_data(micro_batch, IDLE_TOWER_KEY, default=False)


def set_idle_tower(micro_batch: TensorDict) -> None:
    """Leave the tower out of a micro-batch of a mini-batch in which no rank has anything for it."""
    tu.assign_non_tensor_data(micro_batch, IDLE_TOWER_KEY, True)
