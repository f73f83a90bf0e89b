"""Text, and images as inputs of multimodal models."""

from types import SimpleNamespace

from transformers import PretrainedConfig

from verl_pg_plugin.modalities.images import IMAGE_MODEL_TYPES, MROPE_MODEL_TYPES, Images
from verl_pg_plugin.modalities.modality import TEXT, Kind, Modality

_NO_MASKS = {"attention_mask": {"full_attention": None, "sliding_attention": None}}
"""Gemma's outer model would build a mask for each layer type; transformers 5.5 needs token types for it in training."""
_BIDIRECTIONAL = Modality(refuses="and tokens of an image see later ones", keywords=_NO_MASKS)
TEXT_PARTS: dict[str, Modality] = {
    **dict.fromkeys(("gemma3", "gemma4", "gemma4_unified"), _BIDIRECTIONAL),
    "mistral3": Modality(refuses="and images of Mistral 3 are not implemented"),
}
"""Multimodal types whose batches without images run; a batch with images is refused."""

__all__ = ["IMAGE_MODEL_TYPES", "MROPE_MODEL_TYPES", "TEXT", "TEXT_PARTS"]
__all__ += ["Images", "Kind", "Modality", "modality_obstacles", "modality_of"]


def modality_obstacles(config: PretrainedConfig | SimpleNamespace) -> list[str]:
    """Return why packed mode cannot run a model's inputs; empty if it can."""
    kind, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    # Text-only Qwen3.5: all three M-RoPE components are equal.
    if kind in (*IMAGE_MODEL_TYPES, *TEXT_PARTS, "qwen3_5_text", "qwen3_5_moe_text"):
        return []
    for other in ("vision_config", "audio_config", "thinker_config"):
        if getattr(config, other, None) is not None:
            return [f"{kind} is multimodal ({other}), and no test runs it"]
    return [f"{kind} uses three-dimensional position ids (mrope)"] if "mrope_section" in rope else []


def modality_of(config: PretrainedConfig) -> Modality:
    """Return the modality of a model; ValueError if none fits."""
    if obstacles := modality_obstacles(config):
        raise ValueError("; ".join(obstacles))
    return Images.of(config) if config.model_type in IMAGE_MODEL_TYPES else TEXT_PARTS.get(config.model_type, TEXT)
