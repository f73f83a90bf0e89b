"""Slices of packed rows: the ranks of a Ulysses group hold every row once, padding after the last."""

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.ranks import on_ranks
from verl_pg_plugin.engine.batch.row_shard import RowShard


def test_one_rank_holds_all_rows_and_padding() -> None:
    shard = RowShard(7)
    assert shard.take(np.arange(5)).tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert shard.own(np.array([1, 4])).tolist() == [0, 1]
    x = torch.ones(7, 2)
    assert shard.gather(x) is x


@given(num_rows=st.integers(1, 50), padding=st.integers(0, 50), data=st.data())
def test_padding_changes_no_row(num_rows: int, padding: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True).map(sorted))
    shard = RowShard(num_rows + padding)
    values = np.arange(1, num_rows + 1)
    assert shard.take(values).tolist() == [*values.tolist(), *[0] * padding]
    assert shard.own(np.array(rows, dtype=np.int64)).tolist() == list(range(len(rows)))


def slices(rank: int) -> dict[int, tuple[list[int], list[int], float]]:
    """Rows, head rows and the gradient through the gather of a few layouts."""
    found = {}
    for num_rows in (1, 2, 7, 8):
        padded = num_rows + num_rows % 2
        shard = RowShard(padded, dist.group.WORLD)
        head_index = np.flatnonzero(np.arange(num_rows) % 3 != 1)
        x = torch.full((shard.num_rows, 1), float(rank), requires_grad=True)
        weights = torch.arange(1.0, padded + 1)
        (shard.gather(x).squeeze(1) * weights).sum().backward()
        assert x.grad is not None
        found[num_rows] = (
            shard.take(np.arange(1, num_rows + 1)).tolist(),
            head_index[shard.own(head_index)].tolist(),
            x.grad.sum().item(),
        )
    return found


def test_two_ranks_hold_every_row_once() -> None:
    first, second = on_ranks(2, slices)
    for num_rows, (rows, head_index, gradient) in first.items():
        others, other_head_rows, other_gradient = second[num_rows]
        padding = num_rows % 2
        assert rows + others == [*range(1, num_rows + 1), *[0] * padding]
        assert head_index + other_head_rows == [row for row in range(num_rows) if row % 3 != 1]
        # Each rank computes the whole loss; averaging over both must leave the gradient of one.
        assert (gradient + other_gradient) / 2 == sum(range(1, num_rows + padding + 1))
