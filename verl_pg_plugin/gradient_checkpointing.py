"""Recomputation of a decoder layer by the installed transformers and torch."""

import torch
from packaging.version import Version
from transformers.modeling_layers import GradientCheckpointingLayer

FLOAT32_ANGLE_TYPES: frozenset[str] = frozenset({"ernie4_5", "ernie4_5_moe", "flex_olmo", "olmo", "olmo2"})
"""Model types whose layers receive float32 rotary angles. FSDP2 casts them to the parameter dtype, but torch 2.11 and
2.12 skip the cast when a checkpointed layer is recomputed and raise a ``CheckpointError``."""

CHECKPOINTS_FORWARD = "__init_subclass__" in vars(GradientCheckpointingLayer)
"""True since transformers 5.23: a layer checkpoints inside its ``forward``, after the hooks of FSDP."""

FSDP2_CASTS_AGAIN = CHECKPOINTS_FORWARD or Version(torch.__version__).release >= (2, 13)
"""True if a recomputed layer receives its inputs in the dtype of its forward."""
