"""Images in the prompts of ``bench_actor.py``: placeholders, pixels and positions."""

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
from verl_pg_plugin.planning.cost import ModelFlops


@dataclass(frozen=True)
class PromptImages:
    """Square images after the first token of every prompt."""

    number: int  # in each prompt
    tokens: int  # of an image, a square number

    @classmethod
    def parse(cls, text: str) -> "PromptImages | None":
        """Parse ``4x1024``: four images of 1,024 tokens."""
        if not text:
            return None
        number, _, tokens = text.partition("x")
        side = int(int(tokens) ** 0.5)
        if side * side != int(tokens):
            raise ValueError(f"tokens of an image must be a square number, got {tokens}")
        return cls(int(number), int(tokens))

    def __str__(self) -> str:
        return f"{self.number}x{self.tokens}"

    def patches(self, config: PretrainedConfig) -> int:
        """Return the patches of one image."""
        return self.tokens * config.vision_config.spatial_merge_size**2

    def put_into(self, samples: Sequence[Sample], config: PretrainedConfig) -> list[Sample]:
        """Return the samples with placeholders in their prompts."""
        one = [config.vision_start_token_id, *[config.image_token_id] * self.tokens, config.vision_end_token_id]
        return [
            replace(sample, prompt=[sample.prompt[0], *one * self.number, *sample.prompt[1:]]) for sample in samples
        ]

    def add_to(self, batch: TensorDict, group: Sequence[int], config: PretrainedConfig) -> TensorDict:
        """Add pixels, a copy for each sequence and equal within a ``group`` (B,), and positions to a batch in place."""
        modality: Any = modality_of(config)
        side = int(self.tokens**0.5) * modality.merge_size
        grid = torch.tensor([(1, side, side)] * self.number)
        numbers = (self.number * self.patches(config), modality.patch_numbers)
        pixels = {g: torch.randn(numbers, generator=torch.Generator().manual_seed(int(g))) for g in set(group)}
        inputs = [{"pixel_values": pixels[g].clone(), "image_grid_thw": grid} for g in group]
        tu.assign_non_tensor_stack(batch, "multi_modal_inputs", inputs)
        positions = [_positions(ids, grid, config) for ids in batch["input_ids"].unbind()]
        batch["position_ids"] = tu.nested_tensor_from_tensor_list(positions, ragged_idx=2)
        return batch

    def flops(
        self, groups: Sequence[Sequence[int]], config: PretrainedConfig, flops: ModelFlops
    ) -> list[tuple[float, float]]:
        """Return each rank's forward FLOPs of the vision encoder, for all sequences and for distinct prompts.

        ``groups`` are the prompts of each rank's sequences.
        """
        one = flops.images(np.full(self.number, self.patches(config)))
        return [(one * len(group), one * len(set(group))) for group in groups]


def _positions(ids: torch.Tensor, grid: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Return (4, L) positions: token index, then the model's time, height and width."""
    model_cls: Any = MODEL_MAPPING[type(config)]
    owner = SimpleNamespace(config=config)
    owner.get_vision_position_ids = MethodType(model_cls.get_vision_position_ids, owner)
    rope, _ = model_cls.get_rope_index(
        owner,
        ids[None],
        mm_token_type_ids=(ids == config.image_token_id).int()[None],
        image_grid_thw=grid,
        attention_mask=torch.ones_like(ids)[None],
    )
    return torch.cat([torch.arange(len(ids))[None], rope[:, 0]])
