"""Images of a prompt, as the rollout ``hf`` shows them to its model, and a processor that makes them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers


class Qwen3VLProcessor(transformers.Qwen3VLProcessor):
    """Images and text; of the same name as transformers', by which verl tells processors apart.

    transformers' own has a part for videos, which torchvision computes. The CPU default has no torchvision: its
    generated checkpoint names no processor class, and ``AutoProcessor`` finds this one by the type of the config.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        # What a processor consists of, transformers reads off the parameters of this method.
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt, in the order of their placeholders; equal ones have equal digests."""

    digest: bytes
    pixel_values: torch.Tensor = field(compare=False, repr=False)  # (patches, numbers of a patch)
    image_grid_thw: torch.Tensor = field(compare=False, repr=False)  # (images, 3)

    @classmethod
    def process(cls, processor: Any, images: Sequence[Any]) -> "PromptImages":
        """From PIL images, by the image part of a checkpoint's processor."""
        made = processor.image_processor(images=list(images), return_tensors="pt")
        pixels, grids = made["pixel_values"], made["image_grid_thw"]
        digest = hashlib.blake2b(pixels.numpy().tobytes() + grids.numpy().tobytes()).digest()
        return cls(digest, pixels, grids)


def rope_positions(model: Any, prompt_ids: Sequence[int], images: PromptImages | None) -> torch.Tensor:
    """(3, L) positions of time, height and width, by the model's own rule."""
    ids = torch.tensor([prompt_ids])
    positions, _ = model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        image_grid_thw=None if images is None else images.image_grid_thw,
        attention_mask=torch.ones_like(ids),
    )
    return positions[:, 0]
