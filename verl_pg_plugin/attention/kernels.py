"""The attention kernels: requirements, features and selection.

A new kernel is a pair of passes in ``passes.py`` and an entry in ``KERNELS``. Importing this module loads neither.
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
    """Features that a model's attention layers need from a kernel."""

    head_dims: frozenset[tuple[int, int]] = frozenset()  # (keys' head dim, values' head dim) of each kind of layer
    softcap: bool = False
    windows: bool = False  # some layers use a sliding window


@dataclass(frozen=True)
class KernelSpec:
    """Requirements and features of a kernel."""

    device_type: str | None = None  # the only device type that runs it; None for all
    min_capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    max_capability: tuple[int, int] | None = None  # None for no limit
    package: str | None = None  # required distribution; None if torch is enough
    install: str = ""  # command that installs it
    head_dims: range | None = None  # supported head dims; None for all
    softcap: bool = True
    float32: bool = True
    narrow_from: tuple[int, int] | None = None  # compute capability from which most head dims above 128 fail

    @property
    def installed(self) -> bool:
        """True by package metadata: an import loads CUDA libraries, and flash-attn 2 and 4 share a folder."""
        return self.package is None or compat.installed(self.package) is not None

    def unmet(self, needs: AttentionNeeds) -> str:
        """Return the feature that a model needs and this kernel lacks, or ''."""
        if needs.softcap and not self.softcap:
            return "does not cap scores (softcap)"
        for width in sorted({max(dims) for dims in needs.head_dims}):
            if self.head_dims is not None and width not in self.head_dims:
                most, step = self.head_dims[-1], self.head_dims.step
                return f"takes head dims up to {most} in steps of {step}, the model has {width}"
        return ""


_flash = partial(KernelSpec, "cuda", head_dims=range(8, 257, 8), float32=False)
KERNELS: dict[str, KernelSpec] = {
    # narrow_from: its assertion on Blackwell (4.0.0b36).
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
"""Kernels by name, fastest first. On a GPU "auto" selects the first that runs and fits the model, never sdpa."""

ATTENTION_KERNELS = ("auto", *KERNELS)


@dataclass(frozen=True)
class Kernel:
    """A selected kernel, the reason, and its passes (``passes.py``)."""

    name: str
    reason: str
    forward: Forward
    backward: Backward
    heads_first: bool = False  # store gradients as (H, T, D): layers compiled with dynamic shapes copy other strides

    def empty_gradient(self, x: Tensor) -> Tensor:
        """Return an uninitialized gradient of ``x`` (T, heads, D)."""
        if not self.heads_first:
            return x.new_empty(x.shape)
        return x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)


def candidates(name: str, device_type: str) -> tuple[str, ...]:
    """Return the kernels that a setting allows on a device, in order of preference."""
    if name != "auto":
        return (name,)
    if device_type != "cuda":
        return ("sdpa",)
    return tuple(kernel for kernel, spec in KERNELS.items() if spec.device_type == device_type)


def select_kernel(name: str, device_type: str, needs: AttentionNeeds | None = None) -> Kernel:
    """Select the attention kernel for a model with these ``needs``; RuntimeError if none runs it on this machine."""
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
    """Return why no kernel of a setting is installed and fits a model, or '' if one does. Does not touch the GPU."""
    names = candidates(setting, device_type)
    obstacles = {name: kernel_obstacle(name, device_type, needs, check_gpu=False) for name in names}
    return "; ".join(f"{name} {why}" for name, why in obstacles.items()) if all(obstacles.values()) else ""


def kernel_obstacle(name: str, device_type: str, needs: AttentionNeeds | None = None, *, check_gpu: bool = True) -> str:
    """Return why a kernel cannot run a model here, with the fix, or '' if it can.

    ``check_gpu`` starts a CUDA context, and for a model with softcap runs the kernel (``passes.softcap_fault``).
    """
    spec, needs = KERNELS[name], needs or AttentionNeeds()
    if spec.device_type not in (None, device_type):
        return f"needs a {spec.device_type} device, this is {device_type}: {ATTENTION_KERNEL}=auto"
    missing = "" if spec.installed else f"needs {spec.package}, which is not installed: {spec.install}"
    if (obstacle := spec.unmet(needs) or missing) or not check_gpu:
        return obstacle
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
            wide.discard(256)  # has separate kernels, whose backward has no windows
        if spec.narrow_from is not None and capability >= spec.narrow_from and wide:
            also = "and on compute capability 10 and 11 of 256 without windows"
            return f"takes head dims up to 128 here, {also}; the model has {max(wide)}"
    if not needs.softcap or spec.package is None:
        return ""
    from verl_pg_plugin.attention.passes import softcap_fault

    logger.info("checking the softcap of %s, which some kernels compile for", name)
    fault = softcap_fault(load_passes(name), max(map(max, needs.head_dims), default=64), device_type)
    return f"{fault}; install one that does: {spec.install}" if fault else ""


def gpus() -> list[str]:
    """Return name, driver, compute capability and memory of each GPU from nvidia-smi, or [] if it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return []
    lines = result.stdout.strip().splitlines() if result.returncode == 0 else []
    return [line for line in lines if line.count(", ") == command[1].count(",")]  # nvidia-smi may print an error


def load_passes(name: str) -> Passes:
    """Import a kernel; RuntimeError if its package is installed but cannot be imported."""
    from verl_pg_plugin.attention import passes

    try:
        return getattr(passes, name)()
    except (ImportError, AttributeError) as error:  # the latter: a folder with files of two package versions
        raise RuntimeError(
            f"attention kernel {name} is installed but cannot be imported ({error}). Fix: reinstall it "
            f"({KERNELS[name].install}) or set {ATTENTION_KERNEL} to another of {', '.join(KERNELS)}"
        ) from error
