"""Text, and the images that some models read beside it."""

from __future__ import annotations

from transformers import PretrainedConfig

from verl_pg_plugin.modalities.images import IMAGE_MODEL_TYPES, TEXT, Modality
from verl_pg_plugin.modalities.text import text_obstacles

__all__ = ["TEXT", "Modality", "modality_obstacles", "modality_of"]


def modality_obstacles(config: PretrainedConfig) -> list[str]:
    """Why no modality fits a model; empty if one does."""
    return [] if config.model_type in IMAGE_MODEL_TYPES else text_obstacles(config)


def modality_of(config: PretrainedConfig) -> Modality:
    """The modality of a model.

    Raises:
        ValueError: there is none.
    """
    if obstacles := modality_obstacles(config):
        raise ValueError("; ".join(obstacles))
    return Modality.of(config) if config.model_type in IMAGE_MODEL_TYPES else TEXT
