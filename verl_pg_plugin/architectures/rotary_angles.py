"""Architectures whose layers are handed rotary angles in float32.

FSDP2 casts what a layer is given to the dtype of its parameters. In the recomputation of a checkpointed layer torch
2.11 and 2.12 leave that out (``FSDPState._pre_forward`` while it is ``PRE_BACKWARD``), so that angles are bf16 in the
forward and float32 in the backward: torch raises ``CheckpointError`` in the first update, under stock verl as well.
Most types round the angles themselves.
"""

from __future__ import annotations

import torch
from packaging.version import Version

__all__ = ["FLOAT32_ANGLE_TYPES", "fsdp2_recomputes_as_it_ran"]

FLOAT32_ANGLE_TYPES: frozenset[str] = frozenset({"ernie4_5", "ernie4_5_moe", "flex_olmo", "olmo", "olmo2"})
"""Found by running every type with what torch 2.12 does (``tests/architectures/test_rotary_angles.py``)."""

CASTS_AGAIN_SINCE = Version("2.13")


def fsdp2_recomputes_as_it_ran(torch_version: str = torch.__version__) -> bool:
    """Whether the recomputation of a layer gets its inputs in the dtype that the forward got them in."""
    return Version(torch_version).release >= CASTS_AGAIN_SINCE.release
