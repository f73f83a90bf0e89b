"""Can this machine run the attention kernel that was asked for?"""

from __future__ import annotations

from verl_pg_plugin.attention.kernels.specs import ATTENTION_KERNEL, KERNELS

__all__ = ["kernel_obstacle"]


def kernel_obstacle(name: str | None, device_name: str) -> tuple[str, str] | None:
    """Why a kernel cannot run here and what to do about it, or None when nothing speaks against it.

    Starts no CUDA context, so the compute capability of a GPU is left to the engine.

    Args:
        name: "auto", None for the default, or one of ``KERNELS``; names that are unknown are another check's.
        device_name: device type as verl names it, such as "cuda" or "cpu".
    """
    spec = KERNELS.get(name or "auto")
    if spec is None:  # auto: sdpa on a CPU, torch's own kernel on a GPU where no package is installed
        return None
    auto = f"{ATTENTION_KERNEL}=auto"
    if spec.device_type not in (None, device_name):
        return f"{name} runs on device {spec.device_type!r}, this machine's is {device_name!r}", auto
    if not spec.installed:
        return f"it needs the package {spec.package}, which is not installed", f"{spec.install}, or {auto}"
    return None
