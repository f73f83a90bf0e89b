"""Kinds of content, one file each; a model has one of them."""

from __future__ import annotations

from typing import TypeAlias

from transformers import PretrainedConfig

from verl_pg_plugin.modalities.images import IMAGE_MODEL_TYPES, Images
from verl_pg_plugin.modalities.text import TEXT, Text, text_obstacles

Modality: TypeAlias = Text | Images


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
    return Images.of(config) if config.model_type in IMAGE_MODEL_TYPES else TEXT
