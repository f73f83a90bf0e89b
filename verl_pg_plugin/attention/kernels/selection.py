"""Causal variable-length attention kernels behind one signature, chosen once with a reason.

Every kernel takes flash-attn's arguments in flash-attn's order and aligns the causal mask bottom-right, so the
last query of a segment sees all of its keys. Shape legend: T query rows, K key rows, H query heads, G key/value
heads, D head dim, S segments.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from verl_pg_plugin.attention.kernels.capped_scores import cap_fault
from verl_pg_plugin.attention.kernels.flash_passes import FlashAttention
from verl_pg_plugin.attention.kernels.specs import (
    ATTENTION_KERNEL,
    ATTENTION_KERNELS,
    KERNELS,
    AttentionNeeds,
    candidates,
)

logger = logging.getLogger(__name__)


class VarlenAttention(Protocol):
    """Attention of S segments packed along the first dimension.

    Args:
        q_THD, k_KGD, v_KGD: queries, keys and values; H is a multiple of G.
        cu_seqlens_q, cu_seqlens_k: (S+1,) int32 on the device of ``q_THD``.
        max_seqlen_q, max_seqlen_k: longest segment, in rows.
        softmax_scale: multiplies the scores.
        window_size: keys a query sees besides itself, to the left; -1 for all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 switches it off.
        sinks_H: one more score of every query of a head, whose value is zero; handed to kernels that take it alone.

    Returns:
        (T, H, D), dtype of ``q_THD``.
    """

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_KGD: torch.Tensor,
        v_KGD: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        window_size: int = -1,
        softcap: float = 0.0,
    ) -> torch.Tensor: ...


def as_it_is(out: torch.Tensor) -> torch.Tensor:
    return out


def by_itself(attend: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return attend(*args, **kwargs)


@dataclass(frozen=True)
class VarlenKernel:
    """A kernel and why it was chosen.

    Attributes:
        rounded: what layers that mix tokens without attention do to their output; verify mode moves both alike.
        around: calls the kernel, given it and its arguments, so that its results are kept for the backward; see
            ``engine.saved_attention``.
    """

    name: str
    reason: str
    attend: VarlenAttention
    rounded: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    around: Callable[..., torch.Tensor] = by_itself

    @property
    def copies_keys(self) -> bool:
        """Whether it takes ``copies`` and the keys of the rows, instead of keys that are copied already."""
        return isinstance(self.attend, FlashAttention)

    def for_compiled_layers(self) -> "VarlenKernel":
        """The same, its gradients as layers that are compiled for any number of rows want them."""
        if not isinstance(self.attend, FlashAttention):
            return self
        return replace(self, attend=replace(self.attend, heads_first=True))

    def __call__(
        self, q_THD: torch.Tensor, k_KGD: torch.Tensor, v_KGD: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """A ``VarlenAttention`` whose values may be narrower than its keys, as in multi-head latent attention.

        Raises:
            NotImplementedError: a model has learned attention sinks, and the kernel takes none.
        """
        sinks = AttentionNeeds(sinks=True)
        if "sinks_H" in kwargs and (misfit := KERNELS[self.name].misfit(sinks, q_THD.device.type)):
            raise NotImplementedError(f"{self.name} {misfit}; set actor_rollout_ref.actor.use_prefix_grouper=False")
        narrower = k_KGD.shape[-1] - v_KGD.shape[-1]
        if not narrower or KERNELS[self.name].narrow_values:
            return self.around(self.attend, q_THD, k_KGD, v_KGD, *args, **kwargs)
        out_THD = self.around(self.attend, q_THD, k_KGD, F.pad(v_KGD, (0, narrower)), *args, **kwargs)
        return out_THD[..., : v_KGD.shape[-1]]


def select_kernel(name: str, device_type: str, needs: AttentionNeeds | None = None) -> VarlenKernel:
    """Choose the attention kernel of this process.

    Args:
        name: one of ``ATTENTION_KERNELS``. On a GPU auto takes the fastest that is installed and fits the model, in the
            order of ``KERNELS``, and never the slow sdpa.
        device_type: "cuda" or "cpu".
        needs: of the model; None for any.

    Raises:
        ValueError: unknown name.
        RuntimeError: the kernel is not installed, cannot run on the device or this model, or was built without capped
            scores, which the model has; the message names the fix.
    """
    if name not in ATTENTION_KERNELS:
        raise ValueError(f"unknown attention kernel {name!r}; choose one of {', '.join(ATTENTION_KERNELS)}")
    needs = needs or AttentionNeeds()
    reasons = [f"{ATTENTION_KERNEL}={name}" + (f" on device {device_type}" if name == "auto" else "")]
    for candidate in candidates(name, device_type):
        obstacle = model_obstacle(candidate, device_type, needs)
        if not obstacle:
            return VarlenKernel(candidate, "; ".join(reasons), load_kernel(candidate))
        reasons.append(f"{candidate} {obstacle}")
    if name != "auto":
        raise RuntimeError(f"attention kernel {reasons[-1]}")
    slow = device_type == "cuda" and not KERNELS["sdpa"].misfit(needs, device_type)
    way_out = f"; or set ++{ATTENTION_KERNEL}=sdpa (slow)" if slow else ""
    raise RuntimeError(f"no attention kernel for this {device_type}: {'; '.join(reasons[1:])}{way_out}")


def model_obstacle(name: str, device_type: str, needs: AttentionNeeds) -> str:
    """Why a kernel cannot run a model here and what would change that; empty if it can.

    For a model that caps scores the kernel is imported and tried, see ``capped_scores``.

    Raises:
        RuntimeError: then its package is installed but cannot be imported.
    """
    spec = KERNELS[name]
    found = kernel_obstacle(name, device_type) or spec.misfit(needs, device_type)
    if found or not needs.softcap:
        return found
    logger.info("trying how %s caps scores, which some kernels compile code for", name)
    widest = max(map(max, needs.head_dims), default=64)
    fault = cap_fault(load_kernel(name), widest, device_type)  # type: ignore[arg-type] # functions, frozen dataclasses
    return f"{fault}; install one that does: {spec.install}" if fault else ""


def kernel_obstacle(name: str, device_type: str) -> str:
    """Why a kernel cannot run here and what would change that; empty if nothing is in the way. Imports no kernel."""
    spec = KERNELS[name]
    if found := spec.obstacle(device_type):
        return found
    if spec.device_type == "cuda":
        if not torch.cuda.is_available():
            return f"needs a GPU and torch {torch.__version__} sees none; VERL_PLATFORM=cpu runs without"
        capability = torch.cuda.get_device_capability()
        if capability < spec.min_capability:
            return f"needs compute capability {spec.min_capability}, this GPU has {capability}"
        if spec.max_capability is not None and capability > spec.max_capability:
            return f"runs up to compute capability {spec.max_capability}, this GPU has {capability}"
    return ""


def load_kernel(name: str) -> VarlenAttention:
    """Import a kernel.

    Raises:
        RuntimeError: its package is installed but cannot be imported.
    """
    spec = KERNELS[name]
    try:
        module = importlib.import_module(spec.module)
    except (ImportError, AttributeError) as error:  # the latter: two packages of different ages in one folder
        raise RuntimeError(
            f"attention kernel {name} is installed but cannot be imported ({error}); reinstall it ({spec.install}) or "
            f"set {ATTENTION_KERNEL} to another of {', '.join(KERNELS)}"
        ) from error
    return module.attend
