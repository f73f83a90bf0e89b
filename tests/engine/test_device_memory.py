"""What ``keep_activations=auto`` may use of a device; a CPU has none to tell of."""

import torch

from verl_pg_plugin.engine import device_memory
from verl_pg_plugin.engine.device_memory import DeviceMemory


def test_what_torch_has_cached_is_usable_and_what_others_hold_is_not(monkeypatch) -> None:
    assert DeviceMemory.read() is None
    numbers = {"memory_allocated": 20, "memory_reserved": 25, "max_memory_allocated": 30}
    monkeypatch.setattr(device_memory, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40, 80))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 2})
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda number=number: number)
    assert DeviceMemory.read() == DeviceMemory(total=80, usable=45, allocated=20, peak=30, retries=2)
