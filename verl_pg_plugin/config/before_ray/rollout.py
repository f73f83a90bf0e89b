"""Is the rollout engine installed, in a version that verl takes?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement
from packaging.version import Version

from verl_pg_plugin.config.before_ray.reading import wrong
from verl_pg_plugin.config.keys import ROLLOUT
from verl_pg_plugin.config.violation import Violation

__all__ = ["rollout_violations"]

NAME = f"{ROLLOUT}.name"
PACKAGES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
LOWEST = {"vllm": "0.18.0"}
"""verl/third_party/vllm/__init__.py of verl 0.9.1 refuses what is older; the other engines have no such line."""


def rollout_violations(config: DictConfig) -> Iterator[Violation]:
    """The engine that ``rollout.name`` stands for is missing or too old for verl."""
    name = OmegaConf.select(config, NAME)
    package = PACKAGES.get(str(name))
    if package is None:
        return  # one of another plugin, or unknown, which the values say
    fix = f"pip install '{_verls_own(package)}' (what verl's own extra names), or {NAME}=<an engine you have>"
    try:
        installed = version(package)
    except PackageNotFoundError:
        yield wrong(config, "rollout_engine", NAME, f"{package} is not installed in {sys.prefix}", fix)
        return
    lowest = LOWEST.get(package)
    if lowest and Version(installed) < Version(lowest):
        why = f"{package} {installed} is older than the lowest that verl takes, {lowest}"
        yield wrong(config, "rollout_engine", NAME, why, fix)


def _verls_own(package: str) -> str:
    """The requirement under that name in verl's own metadata; the bare name where there is none."""
    declared = map(Requirement, requires("verl") or ())
    return next((f"{found.name}{found.specifier}" for found in declared if found.name == package), package)
