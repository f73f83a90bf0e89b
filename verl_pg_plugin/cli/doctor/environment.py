"""Versions, attention kernels, and the parts of verl, transformers and torch that we depend on."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from verl_pg_plugin.cli.doctor.report import Problem, Section

__all__ = ["kernels", "parts", "versions"]

PROJECT = "verl-pg-plugin"
PACKAGES = (
    PROJECT,
    "verl",
    "torch",
    "triton",
    "transformers",
    "prefix_grouper",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "liger-kernel",
    "ray",
    "TransferQueue",
    "tensordict",
    "hydra-core",
)
EXTRAS = ("trainer",)
"""Extras without which verl's trainers do not start."""


def versions() -> Section:
    """Installed versions, and what is missing or outside the range that this package declares."""
    rows: list[tuple[str, ...]] = [("python", platform.python_version())]
    ranges = {requirement.name: str(requirement.specifier) for requirement in _requirements()}
    rows += [
        (name, _version(name) or "not installed", f"supported: {ranges[name]}" if ranges.get(name) else "")
        for name in PACKAGES
    ]
    rows += [("GPU, driver, compute capability", gpu) for gpu in _gpus() or ["none (nvidia-smi finds no GPU)"]]
    return Section("Versions", tuple(rows), tuple(_requirement_problems()))


def parts() -> Section:
    """Parts of other packages that look otherwise than when our code was written."""
    from verl_pg_plugin.contract.verl import PARTS, changes

    found = changes()
    state = f"{len(found)} of {len(PARTS)} differ" if found else f"all {len(PARTS)} are as they were"
    rows = [("signatures", state)]
    problems = [Problem(message, f"pip install '{_requirement(message.partition('.')[0])}'") for message in found]
    return Section("Parts of verl, transformers and torch that we build on", tuple(rows), tuple(problems))


def kernels(device: str, available: bool) -> Section:
    """The attention kernels of packed mode, and the one that ``auto`` takes.

    Args:
        device: as verl names it, "cuda" or "cpu".
        available: whether there is such a device; where none is, no kernel can be found and none is missed.
    """
    import torch

    from verl_pg_plugin.attention.kernels import KERNELS, kernel_obstacle, select_kernel

    rows = [(name, kernel_obstacle(name, device) or "can run") for name in KERNELS]
    rows.append(("CUDA of torch", torch.version.cuda or "none"))
    try:
        chosen = select_kernel("auto", device)
    except RuntimeError as error:
        problem = Problem(
            f"prefix_grouper.attention_kernel=auto: {error}", "pip install --no-build-isolation flash-attn"
        )
        return Section("Attention kernels", (*rows, ("auto", "none")), (problem,) if available else ())
    return Section("Attention kernels", (*rows, ("auto", f"takes {chosen.name} ({chosen.reason})")))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip().splitlines() if result.returncode == 0 else []


def _requirements() -> list[Requirement]:
    """What this package declares, with the extras that a training needs; empty if it is not installed."""
    try:
        declared = [Requirement(line) for line in requires(PROJECT) or ()]
    except PackageNotFoundError:
        return []
    environments = [{"extra": extra} for extra in ("", *EXTRAS)]
    return [
        requirement
        for requirement in declared
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments))
    ]


def _requirement(name: str) -> str:
    found = next((requirement for requirement in _requirements() if requirement.name == name), None)
    return f"{name}{found.specifier}" if found else name


def _requirement_problems() -> list[Problem]:
    problems = []
    for requirement in _requirements():
        installed = _version(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if installed is None:
            problems.append(Problem(f"{requirement.name} is not installed", f"pip install '{wanted}'"))
        elif not requirement.specifier.contains(installed, prereleases=True):
            what = f"{requirement.name} {installed} is outside the supported range {requirement.specifier}"
            problems.append(Problem(what, f"pip install '{wanted}'"))
    return problems
