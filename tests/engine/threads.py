"""Ranks as threads of one process: what they agree on, without models and collectives, in milliseconds."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from verl_pg_plugin.engine import ranks
from verl_pg_plugin.engine.batch import micro_batch_plan

SECONDS = 10.0
"""A rank that waits so long for the others waits for ever."""
MOST_QUESTIONS = 100
"""Ranks that ask each other more often than this never agree."""


EVERYONE: Any = object()
"""The group of all threads, where one is asked for."""


def on_threads(world_size: int, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """``function(rank)`` on each rank, and what each returns, or the exception it raised.

    A rank that asks the others for something they do not ask for ends with ``threading.BrokenBarrierError``.
    """
    barrier, values, this = threading.Barrier(world_size, timeout=SECONDS), [None] * world_size, threading.local()

    def over_ranks(value: Any, group: Any) -> list[Any]:
        this.questions += 1
        assert this.questions < MOST_QUESTIONS, "the ranks never agree"
        values[this.rank] = value
        barrier.wait()
        everyones = list(values)
        barrier.wait()
        return everyones

    for module in (ranks, micro_batch_plan):
        monkeypatch.setattr(module, "over_ranks", over_ranks)
    monkeypatch.setattr(micro_batch_plan.dist, "get_rank", lambda group=None: this.rank)

    def run(rank: int) -> Any:
        this.rank, this.questions = rank, 0
        try:
            return function(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(run, range(world_size)))
