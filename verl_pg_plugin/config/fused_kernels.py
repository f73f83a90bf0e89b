"""The back ends of verl's fused linear cross entropy: their names, and whether this machine has one."""

from __future__ import annotations

import importlib.util

BACKEND = "actor_rollout_ref.model.fused_kernel_options.impl_backend"


def fused_backend_obstacle(backend: str | None, device_name: str) -> str:
    """Why a back end cannot run here and what would change that; empty if nothing is in the way.

    Args:
        backend: verl's ``model.fused_kernel_options.impl_backend``.
        device_name: device type as verl names it, such as "cuda" or "cpu".
    """
    if backend not in ("torch", "triton", "liger"):
        return f"is unknown; set {BACKEND}=torch, triton or liger"
    if backend != "torch" and device_name != "cuda":
        return f"needs a GPU; set {BACKEND}=torch"
    if backend == "liger" and importlib.util.find_spec("liger_kernel") is None:
        return f"needs Liger, and verl would take torch instead: pip install liger-kernel, or set {BACKEND}=torch"
    return ""
