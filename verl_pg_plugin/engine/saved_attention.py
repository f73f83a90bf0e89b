"""Gradient checkpointing that keeps what attention computed and recomputes the rest of a layer.

Attention is the one part of a layer whose cost grows with the length of the sequences, and its output is small: H x D
numbers per row, one to two times the hidden size. So keeping it saves the larger share of the recomputation for little
memory (selective activation checkpointing, ``torch.utils.checkpoint.create_selective_checkpoint_contexts``).
"""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from verl_pg_plugin.attention.kernels.specs import KERNELS


def save_attention(module: Any, kernel_name: str) -> None:
    """Checkpoint the layers of a transformers model but for their attention kernel.

    Raises:
        RuntimeError: the kernel's package has renamed its operator, so nothing would be kept.
    """
    saved = KERNELS[kernel_name].saved_ops
    for op in saved:
        namespace, _, name = op.partition("::")
        if not hasattr(getattr(torch.ops, namespace), name):
            raise RuntimeError(
                f"attention kernel {kernel_name} has no operator {op} in this version, so its outputs cannot be kept; "
                "set prefix_grouper.recompute_attention=True"
            )
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, saved))
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts})


def _policy(saved: tuple[str, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in saved else CheckpointPolicy.PREFER_RECOMPUTE
