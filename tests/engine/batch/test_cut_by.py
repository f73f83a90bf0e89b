"""Engines of one process that cut at the same time: each mini-batch by its own, whoever starts or ends first."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.workers.engine.fsdp import transformer_impl

from verl_pg_plugin.upstream import micro_batches_cut_by

SECONDS = 30.0
"""A thread that waits so long for the other waits for ever."""


def cut_as(name: str) -> Any:
    return lambda data, dp_group: ([f"{name} cut {data['of'].tolist()}"], [[0]])


def batch(number: int) -> TensorDict:
    return TensorDict({"of": torch.tensor([number])}, batch_size=1)


def cut(data: TensorDict) -> Any:
    return transformer_impl.prepare_micro_batches(data=data, dp_group=None)[0]


@pytest.fixture
def not_yet_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own functions, as in a process in which no engine of ours has run."""
    for name in ("prepare_micro_batches", "postprocess_batch_func"):
        function = getattr(transformer_impl, name)
        monkeypatch.setattr(transformer_impl, name, getattr(function, "__wrapped__", function))


@pytest.mark.usefixtures("not_yet_replaced")
@pytest.mark.parametrize("first_left", [0, 1], ids=["first in first out", "first in last out"])
def test_blocks_that_overlap_may_end_in_any_order(first_left: int) -> None:
    batches, blocks = [batch(0), batch(1)], [ExitStack(), ExitStack()]
    for number, block in enumerate(blocks):
        block.enter_context(micro_batches_cut_by(cut_as(f"engine {number}"), batches[number]))
    assert [cut(data) for data in batches] == [["engine 0 cut [0]"], ["engine 1 cut [1]"]]
    blocks[first_left].close()
    assert cut(batches[1 - first_left]) == [f"engine {1 - first_left} cut [{1 - first_left}]"]
    assert list(batches[first_left].keys()) == ["of"], "it goes to verl's own function from here on"
    blocks[1 - first_left].close()
    assert list(batches[1 - first_left].keys()) == ["of"]


@pytest.mark.usefixtures("not_yet_replaced")
def test_threads_cut_their_own_mini_batches() -> None:
    """Both are inside their blocks at once, and what runs last in one started first in the other."""
    together = threading.Barrier(2, timeout=SECONDS)

    def run(number: int) -> list[Any]:
        found = []
        for round_ in range(50):
            data = batch(100 * number + round_)
            together.wait()
            with micro_batches_cut_by(cut_as(f"thread {number}"), data):
                if (number + round_) % 2:
                    together.wait()
                found.append(cut(data))
                if not (number + round_) % 2:
                    together.wait()
        return found

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(run, range(2)))
    for number, found in enumerate(results):
        assert found == [[f"thread {number} cut [{100 * number + round_}]"] for round_ in range(50)]
