"""The attention kernels: what each needs, what it computes, and which one a process takes.

A new kernel is a pair of passes in ``passes.py`` and an entry in ``KERNELS``. The import loads no kernel and no torch.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from verl_pg_plugin import compat

if TYPE_CHECKING:
    from torch import Tensor

    from verl_pg_plugin.attention.passes import Backward, Forward, Passes

logger = logging.getLogger(__name__)

ATTENTION_KERNEL = "++prefix_grouper.attention_kernel"


@dataclass(frozen=True)
class AttentionNeeds:
    """What the attention layers of a model ask of a kernel."""

    head_dims: frozenset[tuple[int, int]] = frozenset()  # (width of queries and keys, of values) of each kind of layer
    softcap: bool = False  # scores are capped
    windows: bool = False  # some layers attend within a window


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel needs and computes."""

    device_type: str | None = None  # the only device that runs it; None for every device
    min_capability: tuple[int, int] = (0, 0)  # compute capability of a CUDA device
    max_capability: tuple[int, int] | None = None  # None where later devices run it too
    package: str | None = None  # distribution that must be installed; None where torch is enough
    install: str = ""  # command that installs it
    head_dims: range | None = None  # widths of heads that it takes; None for all
    softcap: bool = True  # whether it caps scores
    float32: bool = True  # whether it computes in float32
    narrow_from: tuple[int, int] | None = None  # compute capability from which few widths above 128 are taken

    @property
    def installed(self) -> bool:
        """By package metadata: an import loads CUDA libraries, and flash-attn 2 and 4 have a folder in common."""
        return self.package is None or compat.installed(self.package) is not None

    def unmet(self, needs: AttentionNeeds) -> str:
        """What a model needs and this kernel does not compute; empty if nothing."""
        if needs.softcap and not self.softcap:
            return "does not cap scores (softcap)"
        for width in sorted({max(dims) for dims in needs.head_dims}):
            if self.head_dims is not None and width not in self.head_dims:
                most, step = self.head_dims[-1], self.head_dims.step
                return f"takes heads of up to {most} numbers in steps of {step}, the model's have {width}"
        return ""


_flash = partial(KernelSpec, "cuda", head_dims=range(8, 257, 8), float32=False)
KERNELS: dict[str, KernelSpec] = {
    # What it asserts on Blackwell (4.0.0b36); on Hopper it takes all.
    "flash_attn_4": _flash(
        min_capability=(9, 0), narrow_from=(10, 0), package="flash-attn-4", install="pip install --pre flash-attn-4"
    ),
    "flash_attn_3": _flash(
        min_capability=(9, 0),
        max_capability=(9, 0),
        package="flash-attn-3",
        install="pip install ./hopper in a checkout of https://github.com/Dao-AILab/flash-attention",
    ),
    "flash_attn_2": _flash(
        min_capability=(8, 0), package="flash-attn", install="pip install --no-build-isolation flash-attn"
    ),
    "torch_varlen": _flash(min_capability=(8, 0), softcap=False),
    "sdpa": KernelSpec(),
}
"""Every kernel by name, the fastest first. On a GPU "auto" takes the first that runs and fits the model, never sdpa."""

ATTENTION_KERNELS = ("auto", *KERNELS)


@dataclass(frozen=True)
class Kernel:
    """A kernel, why it was chosen, and its passes (``passes.py``)."""

    name: str
    reason: str
    forward: Forward
    backward: Backward
    # Gradients lie in memory as (H, T, D). Layers that are compiled for any number of tokens would copy others, since
    # AOTAutograd's tangents of symbolic sizes are contiguous.
    heads_first: bool = False

    def memory(self, x: Tensor) -> Tensor:
        """For a gradient of ``x`` (T, heads, D)."""
        if not self.heads_first:
            return x.new_empty(x.shape)
        return x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)


def candidates(name: str, device_type: str) -> tuple[str, ...]:
    """Kernels that a setting stands for on a device, in the order in which they are tried."""
    if name != "auto":
        return (name,)
    if device_type != "cuda":
        return ("sdpa",)
    return tuple(kernel for kernel, spec in KERNELS.items() if spec.device_type == device_type)


def select_kernel(name: str, device_type: str, needs: AttentionNeeds | None = None) -> Kernel:
    """Choose the attention kernel of this process, for a model with these ``needs``, or for any.

    Raises RuntimeError where no such kernel runs this model here; the message names the fix.
    """
    reasons = [f"{ATTENTION_KERNEL}={name}" + (f" on device {device_type}" if name == "auto" else "")]
    for candidate in candidates(name, device_type):
        obstacle = kernel_obstacle(candidate, device_type, needs)
        if not obstacle:
            return Kernel(candidate, "; ".join(reasons), *load_passes(candidate))
        reasons.append(f"{candidate} {obstacle}")
    if name != "auto":
        raise RuntimeError(f"attention kernel {reasons[-1]}")
    way_out = f"; or set {ATTENTION_KERNEL}=sdpa (slow)" if device_type == "cuda" else ""
    raise RuntimeError(f"no attention kernel for this {device_type}: {'; '.join(reasons[1:])}{way_out}")


def setting_obstacle(setting: str, device_type: str, needs: AttentionNeeds) -> str:
    """Why no kernel that a setting stands for is installed and computes a model; empty if one is. Asks no GPU."""
    names = candidates(setting, device_type)
    found = {name: kernel_obstacle(name, device_type, needs, asks_gpu=False) for name in names}
    return "; ".join(f"{name} {why}" for name, why in found.items()) if all(found.values()) else ""


def kernel_obstacle(name: str, device_type: str, needs: AttentionNeeds | None = None, *, asks_gpu: bool = True) -> str:
    """Why a kernel cannot run a model here and what would change that; empty if it can.

    To ask the GPU starts a CUDA context. Then the kernel is also imported (``load_passes``) and tried
    (``passes.softcap_fault``), for a model that caps scores alone.
    """
    spec, needs = KERNELS[name], needs or AttentionNeeds()
    if spec.device_type not in (None, device_type):
        return f"needs a {spec.device_type} device, this is {device_type}: {ATTENTION_KERNEL}=auto"
    missing = "" if spec.installed else f"needs {spec.package}, which is not installed: {spec.install}"
    if (found := spec.unmet(needs) or missing) or not asks_gpu:
        return found
    if spec.device_type == "cuda":
        import torch

        if not torch.cuda.is_available():
            return f"needs a GPU and torch {torch.__version__} sees none; VERL_PLATFORM=cpu runs without"
        capability = torch.cuda.get_device_capability()
        if capability < spec.min_capability:
            return f"needs compute capability {spec.min_capability}, this GPU has {capability}"
        if spec.max_capability is not None and capability > spec.max_capability:
            return f"runs up to compute capability {spec.max_capability}, this GPU has {capability}"
        wide = {max(dims) for dims in needs.head_dims if max(dims) > 128}
        if capability < (12, 0) and not needs.windows:
            wide.discard(256)  # by kernels of its own, whose backward has no windows
        if spec.narrow_from is not None and capability >= spec.narrow_from and wide:
            also = "and on compute capability 10 and 11 of 256 without windows"
            return f"takes heads of up to 128 numbers here, {also}; the model's have {max(wide)}"
    if not needs.softcap or spec.package is None:
        return ""
    from verl_pg_plugin.attention.passes import softcap_fault

    logger.info("trying how %s caps scores, which some kernels compile code for", name)
    fault = softcap_fault(load_passes(name), max(map(max, needs.head_dims), default=64), device_type)
    return f"{fault}; install one that does: {spec.install}" if fault else ""


def gpus() -> list[str]:
    """Name, driver, compute capability and memory of each GPU; empty where nvidia-smi does not tell. Needs no CUDA."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return []
    lines = result.stdout.strip().splitlines() if result.returncode == 0 else []
    return [line for line in lines if line.count(", ") == command[1].count(",")]  # it may tell of no GPU in words


def load_passes(name: str) -> Passes:
    """Import a kernel; RuntimeError where its package is installed but cannot be imported."""
    from verl_pg_plugin.attention import passes

    try:
        return getattr(passes, name)()
    except (ImportError, AttributeError) as error:  # the latter: two packages of different ages in one folder
        raise RuntimeError(
            f"attention kernel {name} is installed but cannot be imported ({error}); reinstall it "
            f"({KERNELS[name].install}) or set {ATTENTION_KERNEL} to another of {', '.join(KERNELS)}"
        ) from error
