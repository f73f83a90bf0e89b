"""verl platform ``cpu``: training without an accelerator, chosen by ``VERL_PLATFORM=cpu`` and never otherwise.

Ray schedules the workers on its ``GPU`` resource, which is a bare counter when Ray is started with
``num_gpus=N``; so N worker processes share the machine's cores and verl's resource checks pass unchanged.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_pg_plugin.cpu import device


def selected() -> bool:
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


# Registered on import, not in a function: some of verl's modules ask for the platform while they are imported.
@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """verl's ``PlatformBase`` on the host processor, with gloo for collectives and no profiler."""

    device_name = vendor_name = "cpu"
    device_module: ModuleType = device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """True only on request: auto-detection must keep finding GPUs on machines that have them."""
        return selected()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    def _no_effect(self, *args: Any) -> None:
        """One device, no cache, no streams, no allocator settings, no profiler."""

    current_device, device_count = staticmethod(device.current_device), staticmethod(device.device_count)
    manual_seed = manual_seed_all = staticmethod(device.manual_seed)
    nvtx_range = nullcontext  # of the range's name
    empty_cache = set_device = synchronize = set_allocator_settings = profiler_start = profiler_stop = cudart = (
        _no_effect
    )
    # Ray counts the workers as if they had GPUs.
    visible_devices_envvar, ray_resource_name = PlatformCUDA.visible_devices_envvar, PlatformCUDA.ray_resource_name
    ray_noset_envvars = PlatformCUDA.ray_noset_envvars
