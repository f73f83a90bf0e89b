"""Gradient checkpointing that keeps what attention computed and recomputes the rest of a layer.

Attention is the one part of a layer whose cost grows with the length of the sequences, and its output is small: as
many numbers as hidden states. So keeping it saves the larger share of the recomputation for little memory (selective
activation checkpointing, ``torch.utils.checkpoint.create_selective_checkpoint_contexts``).
"""

from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

FORWARD_OPS = {
    "flash_attn_4": "verl_pg_plugin::flash_attn_4_forward",
    "flash_attn_2": "flash_attn::_flash_attn_varlen_forward",
    "torch_varlen": "torch_attn::_varlen_attn",
    "sdpa": "aten::_scaled_dot_product_flash_attention_for_cpu",
}
"""What the forward of each kernel is to torch's dispatcher."""


def save_attention(module: Any, kernel_name: str) -> None:
    """Checkpoint the layers of a transformers model but for their attention kernel, one of ``FORWARD_OPS``."""
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, FORWARD_OPS[kernel_name]))
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts})


def _policy(saved: str, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() == saved else CheckpointPolicy.PREFER_RECOMPUTE
