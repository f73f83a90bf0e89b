"""Varlen attention kernels: a table of specs, one file each, and how one is chosen."""

from typing import Any

from verl_pg_plugin.attention.kernels.specs import (
    ATTENTION_KERNEL,
    ATTENTION_KERNELS,
    KERNELS,
    AttentionNeeds,
    candidates,
    model_misfit,
)

__all__ = ["ATTENTION_KERNEL", "ATTENTION_KERNELS", "KERNELS", "AttentionNeeds", "candidates", "model_misfit"]


def __getattr__(name: str) -> Any:
    if name not in ("kernel_obstacle", "model_obstacle", "select_kernel"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl_pg_plugin.attention.kernels import selection

    return getattr(selection, name)
