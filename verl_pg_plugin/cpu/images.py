"""Image inputs of the rollout ``hf``, and a processor that works without torchvision."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers


class Qwen3VLProcessor(transformers.Qwen3VLProcessor):
    """transformers' processor without videos, which need torchvision; verl selects its code by the class name.

    The generated checkpoint names no processor class, so ``AutoProcessor`` selects this one by config type.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        # transformers reads a processor's components from the parameters of this method.
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


@dataclass(frozen=True)
class PromptImages:
    """Images of one prompt, in placeholder order, compared by digest."""

    digest: bytes
    pixel_values: torch.Tensor = field(compare=False, repr=False)  # (patches, numbers of a patch)
    image_grid_thw: torch.Tensor = field(compare=False, repr=False)  # (images, 3)

    @classmethod
    def process(cls, processor: Any, images: Sequence[Any]) -> "PromptImages":
        """Run a checkpoint's image processor on PIL images."""
        outputs = processor.image_processor(images=list(images), return_tensors="pt")
        pixels, grids = outputs["pixel_values"], outputs["image_grid_thw"]
        digest = hashlib.blake2b(pixels.numpy().tobytes() + grids.numpy().tobytes()).digest()
        return cls(digest, pixels, grids)


def rope_positions(model: Any, prompt_ids: Sequence[int], images: PromptImages | None) -> torch.Tensor:
    """Return the model's (3, L) M-RoPE positions: time, height, width."""
    ids = torch.tensor([prompt_ids])
    positions, _ = model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        image_grid_thw=None if images is None else images.image_grid_thw,
        attention_mask=torch.ones_like(ids),
    )
    return positions[:, 0]
