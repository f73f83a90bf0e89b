"""Pictures of a prompt, as the rollout ``hf`` shows them to its model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_pg_plugin.modalities.pictures.modality import PICTURE_MODEL_TYPES


@dataclass(frozen=True, eq=False)
class PromptPictures:
    """The images of one prompt, in the order of their placeholders.

    Attributes:
        pixel_values: (patches, numbers of a patch).
        image_grid_thw: (images, 3).
        digest: of both; prompts with equal tokens and digests are one prompt.
    """

    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor
    digest: bytes

    @classmethod
    def process(cls, processor: Any, images: Sequence[Any]) -> PromptPictures:
        """From PIL images, by the image part of a checkpoint's processor."""
        made = processor.image_processor(images=list(images), return_tensors="pt")
        pixels, grids = made["pixel_values"], made["image_grid_thw"]
        digest = hashlib.blake2b(pixels.numpy().tobytes() + grids.numpy().tobytes()).digest()
        return cls(pixels, grids, digest)


def reads_pictures(config: Any) -> bool:
    """Whether a model with this config takes images, and positions in three dimensions."""
    return config.model_type in PICTURE_MODEL_TYPES


def placeholders(config: Any) -> list[int]:
    """Tokens that a model must not write: each stands for a part of a picture that is not there."""
    return [config.image_token_id, config.video_token_id] if reads_pictures(config) else []


def model_inputs(pictures: Sequence[PromptPictures | None], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Keywords of a forward over prompts with these pictures; none where no prompt has any."""
    shown = [part for part in pictures if part is not None]
    if not shown:
        return {}
    return {
        "pixel_values": torch.cat([part.pixel_values for part in shown]).to(dtype),
        "image_grid_thw": torch.cat([part.image_grid_thw for part in shown]),
    }


def rope_positions(model: Any, prompt_ids: Sequence[int], pictures: PromptPictures | None) -> torch.Tensor:
    """(3, L) positions of time, height and width, by the model's own rule."""
    ids = torch.tensor([prompt_ids])
    positions, _ = model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        image_grid_thw=None if pictures is None else pictures.image_grid_thw,
        attention_mask=torch.ones_like(ids),
    )
    return positions[:, 0]
