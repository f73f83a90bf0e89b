"""Gradient checkpointing that keeps what attention computed and recomputes the rest of a layer.

Attention is the one part of a layer whose cost grows with the length of the sequences, and its output is small: H x D
numbers per row, one to two times the hidden size. So keeping it saves the larger share of the recomputation for little
memory (selective activation checkpointing, ``torch.utils.checkpoint.create_selective_checkpoint_contexts``).
"""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

FORWARD_OPS = {
    "flash_attn_4": ("verl_pg_plugin::flash_attn_4_forward",),
    "flash_attn_2": ("flash_attn::_flash_attn_varlen_forward",),
    "torch_varlen": ("torch_attn::_varlen_attn",),
    "sdpa": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    ),
}
"""What the forward of each loaded kernel may be to torch's dispatcher."""


def save_attention(module: Any, kernel_name: str) -> None:
    """Checkpoint the layers of a transformers model but for their attention kernel, one of ``FORWARD_OPS``.

    Raises:
        RuntimeError: the kernel's package has renamed its operator, so nothing would be kept.
    """
    saved = FORWARD_OPS[kernel_name]
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
