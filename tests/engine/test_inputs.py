"""Slices of packed rows: the ranks of a Ulysses group hold every row once, padding after the last."""

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from tests.layout.tries import batch_of
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.engine.inputs import ModelInputs, packed_inputs
from verl_pg_plugin.modalities import TEXT

PROMPT = tuple(range(100, 112))
LAYOUT = batch_of((PROMPT, (1, 2, 3)), (PROMPT, (4, 5))).layout()
RANKS, PADDED = 3, 18
BATCH = TensorDict({}, batch_size=2)


@pytest.fixture
def of_ranks(monkeypatch: pytest.MonkeyPatch) -> list[ModelInputs]:
    """Rows of a group of three ranks, the first of which has no row with a label in a response."""
    inputs: list[ModelInputs] = []
    monkeypatch.setattr(dist, "get_world_size", lambda group: RANKS)
    for rank in range(RANKS):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        inputs.append(
            packed_inputs(
                LAYOUT,
                BATCH,
                select_kernel("sdpa", "cpu"),
                TEXT,
                torch.device("cpu"),
                runs_encoder=False,
                token_multiple=PADDED,
                sp_group=object(),  # type: ignore[arg-type]
            )
        )
    return inputs


def test_slices_hold_every_token_once_and_padding_after_the_last(of_ranks: list[ModelInputs]) -> None:
    padding = [0] * (PADDED - LAYOUT.num_tokens)
    for name in ("input_ids", "position_ids"):
        together = torch.cat([getattr(rows, name) for rows in of_ranks], dim=1)
        assert together.tolist() == [[*getattr(LAYOUT, name).tolist(), *padding]]


def test_every_label_is_computed_on_the_rank_that_holds_it(of_ranks: list[ModelInputs]) -> None:
    heads = torch.cat([rows.input_ids[0, rows.head_columns] for rows in of_ranks[1:]])
    labels = torch.cat([rows.labels for rows in of_ranks[1:]])
    assert heads.tolist() == LAYOUT.input_ids[LAYOUT.head_index].tolist()
    assert labels.tolist() == LAYOUT.labels[LAYOUT.head_index].tolist()
    sequences = torch.cat([rows.label_sequence for rows in of_ranks[1:]])
    assert sequences.tolist() == LAYOUT.head_sequence.tolist()


def test_a_rank_without_labels_runs_the_head_on_a_token_that_nobody_reads(of_ranks: list[ModelInputs]) -> None:
    """FSDP gathers the head's weight on all ranks or on none."""
    first = of_ranks[0]
    assert first.head_columns.tolist() == first.label_sequence.tolist() == [0]
    assert first.labels.tolist() == [101]
