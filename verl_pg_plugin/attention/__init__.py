"""One attention op over a packed layout, its kernels, and its entry in transformers' attention registry."""

from verl_pg_plugin.attention.interface import ATTENTION_NAME, register_attention
from verl_pg_plugin.attention.kernels.selection import VarlenKernel, select_kernel
from verl_pg_plugin.attention.packed_attention import PackedAttention, packed_attention

__all__ = [
    "ATTENTION_NAME",
    "PackedAttention",
    "VarlenKernel",
    "packed_attention",
    "register_attention",
    "select_kernel",
]
