"""Kinds of content, one file or folder each; a new one is that and its line in ``MODALITIES``."""

from __future__ import annotations

from transformers import PretrainedConfig

from verl_pg_plugin.modalities.pictures.modality import Pictures
from verl_pg_plugin.modalities.protocol import Content, ContentInputs, Modality
from verl_pg_plugin.modalities.text import Text

__all__ = ["MODALITIES", "Content", "ContentInputs", "Modality", "modality_obstacles", "modality_of"]

MODALITIES: dict[str, type[Modality]] = {modality.name: modality for modality in (Text, Pictures)}
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
