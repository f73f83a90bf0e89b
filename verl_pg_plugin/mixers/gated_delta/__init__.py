"""Gated DeltaNet over shared tokens."""

from verl_pg_plugin.mixers.gated_delta.kernels import has_fla
from verl_pg_plugin.mixers.gated_delta.layer import GATED_DELTA
from verl_pg_plugin.mixers.gated_delta.mixer import MULTIMODAL_MODEL_TYPES

__all__ = ["GATED_DELTA", "MULTIMODAL_MODEL_TYPES", "has_fla"]
