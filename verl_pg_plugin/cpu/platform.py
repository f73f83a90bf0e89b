"""verl platform ``cpu``: training without an accelerator, chosen by ``VERL_PLATFORM=cpu`` and never otherwise.

Ray schedules the workers on its ``GPU`` resource, which is a bare counter when Ray is started with
``num_gpus=N``; so N worker processes share the machine's cores and verl's resource checks pass unchanged.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_pg_plugin.cpu import device


def selected() -> bool:
    """Whether the user asked for this platform in the environment."""
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

    def current_device(self) -> Any:
        return device.current_device()

    def device_count(self) -> int:
        return device.device_count()

    def manual_seed(self, seed: int) -> None:
        device.manual_seed(seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return device.get_device_capability()

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        return nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def empty_cache(self, *args: Any) -> None:
        """Nothing to do: one device, no cache, no streams, no allocator settings, no profiler."""

    manual_seed_all = manual_seed
    set_device = synchronize = set_allocator_settings = profiler_start = profiler_stop = cudart = empty_cache
