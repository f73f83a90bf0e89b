"""The back ends of verl's fused linear cross entropy: their names, and whether this machine has one."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

from packaging.version import Version


def fused_backend_problem(backend: str | None, device_name: str) -> str | None:
    """Why a back end cannot run here, None if nothing is in the way.

    Args:
        backend: verl's ``model.fused_kernel_options.impl_backend``.
        device_name: device type as verl names it, such as "cuda" or "cpu".
    """
    if backend not in ("torch", "triton", "liger"):
        return "is unknown; the back ends are torch, triton and liger"
    if backend != "torch" and device_name != "cuda":
        return f"needs a GPU, this machine's device is {device_name!r}"
    if backend == "liger" and Version(version("verl")) < Version("0.9.1"):
        return "needs verl 0.9.1 or later"
    if backend == "liger" and importlib.util.find_spec("liger_kernel") is None:
        return "needs the package liger-kernel, which is not installed, and verl would take torch instead"
    return None
