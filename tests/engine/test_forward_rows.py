"""What each Ulysses rank runs its model and head on, together, is what one rank would."""

import pytest
import torch
import torch.distributed as dist

from tests.layout.tries import batch_of
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.engine.batch.row_shard import RowShard
from verl_pg_plugin.engine.forward_rows import ForwardRows

PROMPT = tuple(range(100, 112))
LAYOUT = batch_of((PROMPT, (1, 2, 3)), (PROMPT, (4, 5))).layout()
RANKS, PADDED = 3, 18


@pytest.fixture
def of_ranks(monkeypatch: pytest.MonkeyPatch) -> list[ForwardRows]:
    """Rows of a group of three ranks, the first of which has no row with a label in a response."""
    shared, rows = PackedAttention(LAYOUT, select_kernel("sdpa", "cpu"), "cpu"), []
    monkeypatch.setattr(dist, "get_world_size", lambda group: RANKS)
    for rank in range(RANKS):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        shard = RowShard(PADDED, object())  # type: ignore[arg-type]
        rows.append(ForwardRows.from_packed(LAYOUT, shared, shard, "cpu"))
    return rows


def test_slices_hold_every_row_once_and_padding_after_the_last(of_ranks: list[ForwardRows]) -> None:
    padding = [0] * (PADDED - LAYOUT.num_rows)
    for name in ("input_ids", "position_ids"):
        together = torch.cat([getattr(rows, name) for rows in of_ranks], dim=1)
        assert together.tolist() == [[*getattr(LAYOUT, name).tolist(), *padding]]


def test_every_head_row_is_computed_on_the_rank_that_holds_it(of_ranks: list[ForwardRows]) -> None:
    heads = torch.cat([rows.input_ids[0, rows.head_columns] for rows in of_ranks[1:]])
    labels = torch.cat([rows.labels for rows in of_ranks[1:]])
    assert heads.tolist() == LAYOUT.input_ids[LAYOUT.head_rows].tolist()
    assert labels.tolist() == LAYOUT.labels[LAYOUT.head_rows].tolist()
    sequences = torch.cat([rows.head_sequence for rows in of_ranks[1:]])
    assert sequences.tolist() == LAYOUT.head_sequence.tolist()


def test_a_rank_without_head_rows_runs_the_head_on_a_row_that_nobody_reads(of_ranks: list[ForwardRows]) -> None:
    """FSDP gathers the head's weight on all ranks or on none."""
    first = of_ranks[0]
    assert first.head_columns.tolist() == first.head_sequence.tolist() == [0]
    assert first.labels.tolist() == [101]
