"""The stack of carried rows keeps their order, their places and a record of its size."""

import pytest
import torch

from verl_pg_plugin.attention.cache import CachedTokens, PrefixCache

ROWS, BYTES_PER_ROW = 100, 2 * 8 * 4 + 2 * 4  # keys and values of one layer, 8 numbers each, and two columns


def block(start: int, stop: int) -> CachedTokens:
    """Rows that hold their positions."""
    rows = torch.arange(start, stop, dtype=torch.float32)
    return CachedTokens(start, stop, {(0, 0): rows}, {(0, 0): -rows}, columns=rows[:, None], column_sums=-rows[:, None])


def test_rows_come_off_in_the_order_of_the_path_and_others_stay() -> None:
    stack = PrefixCache()
    for start, stop in ((0, 3), (3, 7), (7, 9)):
        stack.push(block(start, stop))
    popped = stack.pop(5)
    assert [(part.start, part.stop) for part in popped] == [(5, 7), (7, 9)]
    for part in [*popped, *stack]:
        rows = torch.arange(part.start, part.stop)
        assert torch.equal(part.key_values[0, 0], rows.float())
        assert torch.equal(part.key_value_sums[0, 0], -rows.float())
        assert part.columns is not None
        assert part.column_sums is not None
        assert torch.equal(part.columns.squeeze(1), rows.float())
        assert torch.equal(part.column_sums.squeeze(1), -rows.float())
    assert stack.num_rows == 5
    assert stack.pop(5) == []


@pytest.mark.parametrize(("start", "stop"), [(5, 6), (2, 6)], ids=["a gap", "an overlap"])
def test_rows_that_do_not_continue_the_path_are_an_error(start: int, stop: int) -> None:
    stack = PrefixCache()
    stack.push(block(0, 3))
    with pytest.raises(RuntimeError, match=f"rows {start} .. 6 do not continue 3 carried rows"):
        stack.push(block(start, stop))


def test_the_peak_is_the_most_that_ever_lay_there() -> None:
    stack = PrefixCache()
    stack.push(block(0, 100))
    stack.pop(10)
    stack.push(block(10, 20))
    assert stack.peak_bytes == 100 * 4 * 4, "four float32 a row"


def pushed() -> PrefixCache:
    block = CachedTokens(
        0,
        ROWS,
        key_values={(0, which): torch.randn(ROWS, 2, 4) for which in (0, 1)},
        columns=torch.randn(ROWS, 2),
    )
    stack = PrefixCache()
    stack.push(block)
    return stack


@pytest.mark.parametrize("keep", [0, 4, 50, 97])
def test_rows_that_were_taken_hold_no_memory(keep: int) -> None:
    """A view of the first four rows of a prompt would hold the whole prompt to the end of the chain."""
    stack = pushed()
    stack.pop(keep)
    held = sum(block.num_bytes for block in stack)
    assert held <= 2 * keep * BYTES_PER_ROW
    assert held >= keep * BYTES_PER_ROW


def test_the_peak_counts_what_views_keep_alive() -> None:
    stack = pushed()
    stack.pop(97)  # three rows are copied, the others stay a view of all
    stack.push(CachedTokens(97, 98, columns=torch.randn(1, 2)))
    assert stack.peak_bytes == ROWS * BYTES_PER_ROW + 8


def test_many_shallow_cuts_do_not_hold_the_first_block() -> None:
    """Growing turns: every owner takes a little, and the first cut of each keeps more than half of the one before."""
    stack = pushed()
    for keep in range(ROWS - 10, 0, -10):
        stack.pop(keep)
        assert sum(block.num_bytes for block in stack) <= 2 * keep * BYTES_PER_ROW
