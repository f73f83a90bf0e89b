"""A batch that cannot be computed, and which models read text alone, whose positions count from 0."""

from __future__ import annotations

from transformers import PretrainedConfig

SHARING_OFF = "set actor_rollout_ref.actor.use_prefix_grouper=False"


class BatchError(ValueError):
    """A batch that packed mode cannot compute; the message names the cause and the fix."""


def text_obstacles(config: PretrainedConfig) -> list[str]:
    """Why a model with this config does not read text alone; empty if it does."""
    kind, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):  # text of several modalities' making: its dimensions are equal
        return []
    for other in ("vision_config", "audio_config", "thinker_config"):
        if getattr(config, other, None) is not None:
            return [f"{kind} is multimodal ({other}); only text models are supported"]
    return [f"{kind} uses three-dimensional position ids (mrope)"] if "mrope_section" in rope else []
