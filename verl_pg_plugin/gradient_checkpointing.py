"""How the installed transformers and torch recompute a decoder layer."""

import torch
from packaging.version import Version
from transformers.modeling_layers import GradientCheckpointingLayer

FLOAT32_ANGLE_TYPES: frozenset[str] = frozenset({"ernie4_5", "ernie4_5_moe", "flex_olmo", "olmo", "olmo2"})
"""Types whose layers are handed rotary angles in float32. FSDP2 casts them to the dtype of the parameters, and torch
2.11 and 2.12 leave that out in the recomputation of a checkpointed layer, which ends in a ``CheckpointError``."""

CHECKPOINTS_FORWARD = "__init_subclass__" in vars(GradientCheckpointingLayer)
"""Whether a layer checkpoints inside of its ``forward``, behind the hooks of FSDP, as since transformers 5.23."""

FSDP2_CASTS_AGAIN = CHECKPOINTS_FORWARD or Version(torch.__version__).release >= (2, 13)
"""Whether the recomputation of a layer gets its inputs in the dtype that the forward got them in."""
