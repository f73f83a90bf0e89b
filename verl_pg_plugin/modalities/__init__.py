"""Kinds of content, one file each; a new one is that and its line in ``MODALITIES``."""

from __future__ import annotations

from typing import TypeAlias

from transformers import PretrainedConfig

from verl_pg_plugin.modalities.content import SHARING_OFF, BatchError, Content, ContentInputs
from verl_pg_plugin.modalities.images import IMAGE_MODEL_TYPES, Images
from verl_pg_plugin.modalities.text import TEXT, Text

__all__ = [
    "IMAGE_MODEL_TYPES",
    "MODALITIES",
    "SHARING_OFF",
    "TEXT",
    "BatchError",
    "Content",
    "ContentInputs",
    "Images",
    "Modality",
    "Text",
    "modality_obstacles",
    "modality_of",
]

Modality: TypeAlias = Text | Images

MODALITIES: dict[str, type[Modality]] = {modality.name: modality for modality in (Text, Images)}
"""Every modality by name; a model has the first that it has no obstacle to."""


def modality_obstacles(config: PretrainedConfig) -> list[str]:
    """Why no modality fits a model, in the words of the first; empty if one does."""
    obstacles = [modality.obstacles(config) for modality in MODALITIES.values()]
    return obstacles[0] if all(obstacles) else []


def modality_of(config: PretrainedConfig) -> Modality:
    """The modality of a model.

    Raises:
        ValueError: there is none.
    """
    for modality in MODALITIES.values():
        if not modality.obstacles(config):
            return modality.of(config)
    raise ValueError("; ".join(modality_obstacles(config)))
