"""Rows of a micro-batch are selected behind the launch of the one before, once, and are at hand behind the loop."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.support import actor_loss, clone, group, make_engine, save_tiny_model
from verl_pg_plugin.engine.batch.lazy_micro_batches import LazyMicroBatches
from verl_pg_plugin.engine.batch.row_selection import RowSelector
from verl_pg_plugin.synthetic import make_batch

BATCH = make_batch([*group(9, [4, 6, 3], 1), *group(7, [5, 2], 2), *group(12, [3, 3], 3)], max_token_len_per_gpu=24)


def test_each_is_made_when_a_loop_comes_to_it_and_never_again() -> None:
    happened: list[Any] = []

    def make(k: int) -> TensorDict:
        happened.append(k)
        return TensorDict({"k": torch.tensor([k])}, batch_size=1)

    lazy = LazyMicroBatches(make, 2, on_arrival=lambda: happened.append("arrives"))
    assert len(lazy) == 2
    assert happened == []
    for micro_batch in lazy:
        happened.append(f"runs {micro_batch['k'].item()}")
    assert happened == ["arrives", 0, "runs 0", "arrives", 1, "runs 1", "arrives"]
    again = replace(lazy, on_arrival=lambda: None)
    assert [id(micro_batch) for micro_batch in again] == [id(micro_batch) for micro_batch in lazy]
    assert happened.count(0) == happened.count(1) == 1


@pytest.mark.usefixtures("process_group")
def test_rows_are_selected_behind_the_forward_of_the_micro_batch_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, select, happened = make_engine(save_tiny_model(tmp_path), packed=True), RowSelector.select, []

    def recorded(selector: RowSelector, rows: list[int]) -> TensorDict:
        happened.append("selected")
        return select(selector, rows)

    def loss(**kwargs: Any) -> Any:
        happened.append("computed")
        return actor_loss()(**kwargs)

    monkeypatch.setattr(RowSelector, "select", recorded)
    with engine.train_mode():
        output = engine.forward_backward_batch(clone(BATCH), loss)
    assert len(output["loss"]) > 1
    assert happened == ["selected", "computed"] * len(output["loss"])
