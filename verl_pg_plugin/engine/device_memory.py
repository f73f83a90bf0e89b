"""Memory of an accelerator as one process sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from verl.utils.device import get_device_name


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes.

    Attributes:
        total: of the device.
        usable: that this process may still allocate: what no process has, and what torch has cached.
        allocated: in tensors of this process.
        peak: the most that was since ``forget_peak``, or ever.
        retries: allocations that succeeded only after torch gave its whole cache back.
    """

    total: int
    usable: int
    allocated: int
    peak: int
    retries: int = 0

    @classmethod
    def read(cls) -> DeviceMemory | None:
        """Of this process' device; None where torch does not tell."""
        if get_device_name() != "cuda":
            return None
        free, total = torch.cuda.mem_get_info()
        allocated = torch.cuda.memory_allocated()
        return cls(
            total=total,
            usable=free + torch.cuda.memory_reserved() - allocated,
            allocated=allocated,
            peak=torch.cuda.max_memory_allocated(),
            retries=torch.cuda.memory_stats().get("num_alloc_retries", 0),
        )

    @staticmethod
    def forget_peak() -> None:
        """The next ``peak`` is of what happens from here on; verl's ``perf/max_memory_*_gb`` are too."""
        if get_device_name() == "cuda":
            torch.cuda.reset_peak_memory_stats()
