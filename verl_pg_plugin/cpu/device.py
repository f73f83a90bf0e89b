"""verl's platform ``cpu``, and the module that replaces ``torch.cuda`` on it.

Only ``VERL_PLATFORM=cpu`` selects it. verl's ``get_torch_device()`` returns this module, since ``torch.cpu`` lacks
memory and random-number calls. Memory is in bytes of the host. Allocations are 0: there is no caching allocator.
"""

import os
import platform
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import psutil
from torch.cpu import Event, Stream, current_stream, device_count, is_available, stream, synchronize  # noqa: F401
from torch.random import get_rng_state, manual_seed, set_rng_state  # noqa: F401
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


def selected() -> bool:
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def current_device() -> str:
    """Return a device name, not an index: ``tensor.to(0)`` would mean the first GPU."""
    return "cpu"


def get_device_name(device: Any = None) -> str:
    """Return the processor's name, which verl's table of peak FLOPS does not contain."""
    return platform.processor() or platform.machine()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return psutil.virtual_memory().available, psutil.virtual_memory().total


def memory_allocated(device: Any = None) -> int:
    return 0


def empty_cache(*args: Any, **kwargs: Any) -> None:
    """Do nothing: there is no cache, one device and no memory limit for each process."""


manual_seed_all = manual_seed
memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated
set_device = ipc_collect = reset_peak_memory_stats = set_per_process_memory_fraction = empty_cache


# On import, not in a function: some verl modules read the platform while they are imported.
@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """verl's ``PlatformBase`` on the host processor. Ray started with ``num_gpus=N`` runs N workers on its cores."""

    device_name = vendor_name = "cpu"
    device_module: ModuleType = sys.modules[__name__]

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return whether it is selected: auto-detection must still choose a GPU."""
        return selected()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    def _no_effect(self, *args: Any) -> None:
        """Do nothing: one device, no cache, streams, allocator settings or profiler."""

    is_available, current_device, device_count = map(staticmethod, (is_available, current_device, device_count))
    manual_seed = manual_seed_all = staticmethod(manual_seed)
    nvtx_range = nullcontext  # of the range's name
    empty_cache = set_device = synchronize = set_allocator_settings = profiler_start = profiler_stop = cudart = (
        _no_effect
    )
    visible_devices_envvar, ray_resource_name = PlatformCUDA.visible_devices_envvar, PlatformCUDA.ray_resource_name
    ray_noset_envvars = PlatformCUDA.ray_noset_envvars
