"""Images in the prompts of ``bench_actor.py``: placeholders, pixels as a processor makes them, and positions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transformers import MODEL_MAPPING, PretrainedConfig
from verl.utils import tensordict_utils as tu

from benchmarks.batches import Sample
from verl_pg_plugin.modalities import modality_of


@dataclass(frozen=True)
class PromptImages:
    """Square images behind the first token of every prompt.

    Attributes:
        number: in each prompt.
        tokens: that each takes, a square number.
    """

    number: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "PromptImages | None":
        """``4x1024`` for four images of 1,024 tokens."""
        if not text:
            return None
        number, _, tokens = text.partition("x")
        side = int(int(tokens) ** 0.5)
        if side * side != int(tokens):
            raise ValueError(f"a square image has no {tokens} tokens; take a square number")
        return cls(int(number), int(tokens))

    def __str__(self) -> str:
        return f"{self.number}x{self.tokens}"

    def patches(self, config: PretrainedConfig) -> int:
        """Of one image."""
        return self.tokens * config.vision_config.spatial_merge_size**2

    def put_into(self, samples: Sequence[Sample], config: PretrainedConfig) -> list[Sample]:
        """The samples with placeholders in their prompts."""
        one = [config.vision_start_token_id, *[config.image_token_id] * self.tokens, config.vision_end_token_id]
        return [
            replace(sample, prompt=[sample.prompt[0], *one * self.number, *sample.prompt[1:]]) for sample in samples
        ]

    def add_to(self, batch: TensorDict, group: Sequence[int], config: PretrainedConfig) -> TensorDict:
        """Pixels and positions of a batch, images of a group alike and every sequence with a copy of its own.

        Args:
            batch: made from ``put_into``; changed in place.
            group: (B,) of each sequence.
        """
        modality: Any = modality_of(config)
        side = int(self.tokens**0.5) * modality.merge_size
        grid = torch.tensor([(1, side, side)] * self.number)
        numbers = (self.number * self.patches(config), modality.patch_numbers)
        pixels = {g: torch.randn(numbers, generator=torch.Generator().manual_seed(int(g))) for g in set(group)}
        given = [{"pixel_values": pixels[g].clone(), "image_grid_thw": grid} for g in group]
        tu.assign_non_tensor_stack(batch, "multi_modal_inputs", given)
        positions = [_positions(ids, grid, config) for ids in batch["input_ids"].unbind()]
        batch["position_ids"] = tu.nested_tensor_from_tensor_list(positions, ragged_idx=2)
        return batch


def _positions(ids: torch.Tensor, grid: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """(4, L): a counter, then time, height and width by the model's own rule, bound as verl's processors bind it."""
    found: Any = MODEL_MAPPING[type(config)]
    owner = SimpleNamespace(config=config)
    owner.get_vision_position_ids = MethodType(found.get_vision_position_ids, owner)
    rope, _ = found.get_rope_index(
        owner,
        ids[None],
        mm_token_type_ids=(ids == config.image_token_id).int()[None],
        image_grid_thw=grid,
        attention_mask=torch.ones_like(ids)[None],
    )
    return torch.cat([torch.arange(len(ids))[None], rope[:, 0]])


def image_flops(images: PromptImages | None, groups: Sequence[Sequence[int]], config: Any, flops: Any) -> Any:
    """Forward FLOPs of the vision encoder on each rank, for every sequence and for every prompt.

    Args:
        groups: of the sequences of each rank.
    """
    if images is None:
        return [(0.0, 0.0)] * len(groups)
    one = flops.images(np.full(images.number, images.patches(config)))
    return [(one * len(group), one * len(set(group))) for group in groups]
