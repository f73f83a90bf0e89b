"""A stand-in for ``torch.cuda`` whose device is the CPU: what verl calls on ``get_torch_device()``.

``torch.cpu`` lacks the memory and random-number calls, so verl cannot run on it unchanged. Memory is in bytes of the
host; allocations are 0, since it has no caching allocator to ask.
"""

from __future__ import annotations

import platform
from typing import Any

import psutil
from torch.cpu import Event, Stream, current_stream, device_count, is_available, stream, synchronize  # noqa: F401
from torch.random import get_rng_state, manual_seed, set_rng_state  # noqa: F401

manual_seed_all = manual_seed


def current_device() -> str:
    """The device itself, not an index: ``tensor.to(0)`` would mean the first GPU."""
    return "cpu"


def get_device_name(device: Any = None) -> str:
    """In verl's table of FLOPS it matches no GPU."""
    return platform.processor() or platform.machine()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return psutil.virtual_memory().available, psutil.virtual_memory().total


def memory_allocated(device: Any = None) -> int:
    return 0


def empty_cache(*args: Any, **kwargs: Any) -> None:
    """Nothing to do: no cache, no choice of device, no share of memory for each process."""


memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated
set_device = ipc_collect = reset_peak_memory_stats = set_per_process_memory_fraction = empty_cache
