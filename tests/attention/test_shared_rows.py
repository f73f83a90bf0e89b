"""What mixers derive from a layout is derived once per forward, for each set of arguments."""

import pytest

from tests.layout.tries import batch_of
from verl_pg_plugin.attention.kernels.selection import select_kernel
from verl_pg_plugin.attention.packed_rows import PackedRows
from verl_pg_plugin.layout import PackedLayout


def test_an_index_is_made_once_for_its_arguments_and_anew_for_others() -> None:
    layout = batch_of(((1, 2), (3,)), ((1, 2), (4,))).layout()
    rows = PackedRows.from_layout(layout, select_kernel("sdpa", "cpu"), "cpu")
    made = []

    def windows(layout: PackedLayout, width: int) -> int:
        made.append(width)
        return layout.num_tokens * width

    assert [rows.index(windows, width) for width in (3, 3, 4)] == [9, 9, 12]
    assert made == [3, 4]


def test_rows_without_a_layout_say_so() -> None:
    rows = PackedRows.from_layout(batch_of(((1, 2), (3,))).layout(), select_kernel("sdpa", "cpu"), "cpu")
    rows.layout = None
    with pytest.raises(RuntimeError, match="have no layout"):
        rows.index(lambda layout: 0)
