"""Text, and images as inputs of multimodal models."""

from types import SimpleNamespace

from transformers import PretrainedConfig

from verl_pg_plugin.modalities.images import IMAGE_MODEL_TYPES, Images
from verl_pg_plugin.modalities.modality import TEXT, Kind, Modality

__all__ = ["IMAGE_MODEL_TYPES", "TEXT", "Images", "Kind", "Modality", "modality_obstacles", "modality_of"]


def modality_obstacles(config: PretrainedConfig | SimpleNamespace) -> list[str]:
    """Return why packed mode cannot run a model's inputs; empty if it can."""
    kind, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    # Text-only Qwen3.5: all three M-RoPE components are equal.
    if kind in (*IMAGE_MODEL_TYPES, "qwen3_5_text", "qwen3_5_moe_text"):
        return []
    for other in ("vision_config", "audio_config", "thinker_config"):
        if getattr(config, other, None) is not None:
            return [f"{kind} is multimodal ({other}); only text models and Qwen's with images are supported"]
    return [f"{kind} uses three-dimensional position ids (mrope)"] if "mrope_section" in rope else []


def modality_of(config: PretrainedConfig) -> Modality:
    """Return the modality of a model; ValueError if none fits."""
    if obstacles := modality_obstacles(config):
        raise ValueError("; ".join(obstacles))
    return Images.of(config) if config.model_type in IMAGE_MODEL_TYPES else TEXT
