"""FLOPs of the tower that turns patches of pictures into rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from verl_pg_plugin.layout.order import IntArray
from verl_pg_plugin.modalities.pictures.modality import PICTURE_MODEL_TYPES


@dataclass(frozen=True)
class TowerFlops:
    """Forward FLOPs of a vision tower that looks at each picture alone, in both directions.

    Attributes:
        per_patch: of a patch outside attention scores.
        pairs: by window, in patches (None for the whole picture), the FLOPs of one pair over the blocks that have it.
    """

    per_patch: float
    pairs: tuple[tuple[int | None, float], ...]

    @classmethod
    def of(cls, module: Any) -> TowerFlops | None:
        """Count the matrices of an unsharded transformers model; None if it reads no pictures, or none are shared."""
        if getattr(module.config, "model_type", None) not in PICTURE_MODEL_TYPES:
            return None
        tower, config = module.model.visual, module.config.vision_config
        lookups = {id(part.weight) for part in tower.modules() if isinstance(part, nn.Embedding)}
        per_patch = 0.0
        for name, weight in tower.named_parameters():
            if weight.ndim >= 2 and id(weight) not in lookups:
                merged = config.spatial_merge_size**2 if "merger" in name else 1
                per_patch += 2 * weight.numel() / merged
        whole = getattr(config, "fullatt_block_indexes", range(config.depth))
        window = (getattr(config, "window_size", 0) // config.patch_size) ** 2
        per_pair = 4.0 * config.hidden_size
        pairs = ((None, per_pair * len(whole)), (window, per_pair * (config.depth - len(whole))))
        return cls(per_patch, tuple(pair for pair in pairs if pair[1]))

    def forward(self, patches: IntArray) -> float:
        """FLOPs of one forward over pictures of so many patches (C,)."""
        total = self.per_patch * float(patches.sum())
        for window, flops in self.pairs:
            seen = patches if window is None else np.minimum(patches, window)
            total += flops * float((patches * seen).sum())
        return total
