"""Ranks as threads of one process: what they agree on, without models and collectives, in milliseconds."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from verl_pg_plugin.engine import ranks

SECONDS = 10.0
"""A rank that waits so long for the others waits for ever."""


def on_threads(world_size: int, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """``function(rank)`` on each rank, and what each returns, or the exception it raised.

    A rank that asks the others for something they do not ask for ends with ``threading.BrokenBarrierError``.
    """
    barrier, values, this = threading.Barrier(world_size, timeout=SECONDS), [None] * world_size, threading.local()

    def gather(value: Any) -> list[Any]:
        values[this.rank] = value
        barrier.wait()
        everyones = list(values)
        barrier.wait()
        return everyones

    monkeypatch.setattr(ranks, "gather", gather)

    def run(rank: int) -> Any:
        this.rank = rank
        try:
            return function(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(run, range(world_size)))
