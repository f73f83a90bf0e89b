"""A stand-in for ``torch.cuda`` whose device is the CPU: what verl calls on ``get_torch_device()``.

``torch.cpu`` itself lacks the memory and random-number calls, so verl cannot run on it unchanged. Memory
figures are in bytes. Allocation figures are 0 because host memory has no caching allocator to ask;
``mem_get_info`` reports the machine's real free and total memory.
"""

from __future__ import annotations

import platform as _platform
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import torch

DEVICE = "cpu"

Stream = torch.cpu.Stream
Event = torch.cpu.Event
current_stream = torch.cpu.current_stream
stream = torch.cpu.stream
synchronize = torch.cpu.synchronize
manual_seed = torch.manual_seed
manual_seed_all = torch.manual_seed


def is_available() -> bool:
    """True: there is always a CPU."""
    return True


def current_device() -> str:
    """The device itself, not an index: ``tensor.to(0)`` would mean the first GPU."""
    return DEVICE


def device_count() -> int:
    """One device a process, however many cores it has."""
    return 1


def set_device(device: object) -> None:
    """Nothing to select: a process has one CPU device."""


def get_device_name(device: object = None) -> str:
    """Name of the processor; in verl's FLOPS table it matches no GPU."""
    return _platform.processor() or _platform.machine()


def get_device_capability(device: object = None) -> tuple[None, None]:
    """A CPU has no CUDA compute capability."""
    return None, None


def get_device_properties(device: object = None) -> SimpleNamespace:
    """``name`` and ``total_memory`` (bytes) of this machine."""
    return SimpleNamespace(name=get_device_name(), total_memory=psutil.virtual_memory().total)


def get_rng_state(device: object = None) -> torch.Tensor:
    """State of the process's default generator, uint8 ``(5056,)``."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    """Restore a state taken with :func:`get_rng_state`."""
    torch.set_rng_state(new_state)


def mem_get_info(device: object = None) -> tuple[int, int]:
    """``(free, total)`` bytes of host memory."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def memory_allocated(device: object = None) -> int:
    """0: see the module's docstring."""
    return 0


memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


def empty_cache() -> None:
    """No cache to empty."""


reset_peak_memory_stats = reset_accumulated_memory_stats = ipc_collect = empty_cache


def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
    """Host memory is not divided between processes."""


nvtx = SimpleNamespace(range=nullcontext)
