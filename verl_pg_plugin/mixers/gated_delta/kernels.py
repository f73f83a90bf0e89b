"""Does this machine compute the gated delta rule, and its backward, rightly?

On a GPU the recurrence needs the kernels of fla, which transformers takes where they are installed: its own fallback
pads segments to equal lengths and steps through them on the host. Known fault: with Triton 3.4 to 3.7.0 the gated
backward is wrong on Hopper, and fla raises in the first one (https://github.com/fla-org/flash-linear-attention/issues/640);
where tilelang is installed, fla takes that instead.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from packaging.version import Version

WRONG_ON_HOPPER = (Version("3.4"), Version("3.7.1"))
"""Triton from the first up to, and without, the second."""
HOPPER = 9
INSTALL_FLA = "pip install fla-core"
INSTALL_TRITON = "pip install --no-deps 'triton>=3.7.1', or pip install tilelang"


def kernel_obstacles(device_name: str) -> list[str]:
    """Why Gated DeltaNet cannot run on this machine, with the command that changes it; empty if it can.

    Args:
        device_name: device type as verl names it; on a CPU nothing is needed.
    """
    if device_name != "cuda":
        return []
    if not has_fla():
        return [f"Gated DeltaNet needs the kernels of flash-linear-attention, which is not installed: {INSTALL_FLA}"]
    triton = _installed("triton")
    first, fixed = WRONG_ON_HOPPER
    wrong = triton is not None and first <= triton < fixed and find_spec("tilelang") is None
    if wrong and HOPPER in gpu_generations():
        why = f"the backward of the gated delta rule is wrong on Hopper with Triton {first} to {fixed} (here {triton})"
        return [f"{why}: {INSTALL_TRITON}"]
    return []


def has_fla() -> bool:
    """Whether flash-linear-attention is installed, which transformers then takes on a GPU."""
    return find_spec("fla") is not None


def gpu_generations() -> frozenset[int]:
    """Major compute capabilities of this machine's GPUs; empty where there is none.

    ``nvidia-smi`` tells without a CUDA context. Where it cannot, or torch has a GPU in use already, torch is asked.
    """
    command = None if torch.cuda.is_initialized() else shutil.which("nvidia-smi")
    if command is not None:
        query = [command, "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            result = subprocess.run(query, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:  # torch is asked below
            result = subprocess.CompletedProcess(query, returncode=1)
        lines = result.stdout.split() if result.returncode == 0 else []
        if found := frozenset(int(line.partition(".")[0]) for line in lines if line[0].isdigit()):
            return found
    if not torch.cuda.is_available():
        return frozenset()
    return frozenset(torch.cuda.get_device_capability(gpu)[0] for gpu in range(torch.cuda.device_count()))


def _installed(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None
