"""What a chain hands on takes the memory that it says, and no more once its owner has taken it."""

import pytest
import torch

from verl_pg_plugin.attention.carry_stack import CarryBlock, CarryStack

ROWS, BYTES_PER_ROW = 100, 2 * 8 * 4 + 2 * 4  # keys and values of one layer, 8 numbers each, and two columns


def pushed() -> CarryStack:
    block = CarryBlock(
        0,
        ROWS,
        key_values={(0, which): torch.randn(ROWS, 2, 4) for which in (0, 1)},
        columns=torch.randn(ROWS, 2),
    )
    stack = CarryStack()
    stack.push(block)
    return stack


@pytest.mark.parametrize("keep", [0, 4, 50, 97, ROWS])
def test_rows_are_handed_to_their_owner_and_the_others_stay(keep: int) -> None:
    stack = pushed()
    (whole,) = stack
    values, columns = whole.key_values[0, 1].clone(), whole.columns.clone()
    popped = stack.pop(keep)
    for blocks, rows in ((list(stack), slice(0, keep)), (popped, slice(keep, ROWS))):
        assert torch.equal(torch.cat([values[:0], *(block.key_values[0, 1] for block in blocks)]), values[rows])
        assert torch.equal(torch.cat([columns[:0], *(block.columns for block in blocks)]), columns[rows])


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
    stack.push(CarryBlock(97, 98, columns=torch.randn(1, 2)))
    assert stack.peak_bytes == ROWS * BYTES_PER_ROW + 8
