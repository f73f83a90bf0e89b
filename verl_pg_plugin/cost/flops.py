"""FLOPs of the rows that are really computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PretrainedConfig

from verl_pg_plugin.architectures import text_skeleton
from verl_pg_plugin.cost.pairs import num_pairs, visible_pairs
from verl_pg_plugin.cost.tower import TowerFlops
from verl_pg_plugin.layout import Layout
from verl_pg_plugin.layout.prefix_order import IntArray
from verl_pg_plugin.mixers import MIXERS, PairCost, count_layers

FORWARDS_OF_AN_UPDATE = 3
"""An update in units of its forward: a backward computes two matrix products for each of the forward's."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""Names that transformers' configs have for them."""


@dataclass(frozen=True)
class ModelFlops:
    """Forward FLOPs of a decoder: two per weight and row, and those of its (query, key) pairs.

    Micro-batches are limited by rows, which is what fills memory; all else that asks for a price asks here.

    Attributes:
        per_row: of a row outside attention scores and head.
        per_head_row: of the LM or value head on one row.
        pairs: of pairs, one entry for each window that some layers have.
        tower: of the patches of pictures; None where no pictures are read.
    """

    per_row: float
    per_head_row: float
    pairs: tuple[PairCost, ...]
    tower: TowerFlops | None = None

    @classmethod
    def of(cls, module: nn.Module) -> "ModelFlops":
        """Count the matrices of an unsharded transformers model; a device of ``meta`` will do.

        Raises:
            ValueError: it has experts, and its config does not say how many a token visits.
        """
        config = module.config.get_text_config()
        head = module.get_output_embeddings()
        if head is None:
            head = getattr(module, "score", None)  # of token classifiers, which value models are
        head_weights = [] if head is None else list(head.parameters())
        lookups = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
        skip = {id(weight) for weight in (*head_weights, *lookups)}
        layers = count_layers(config)
        per_row = sum(MIXERS[name].row_flops(config) for name in layers)
        # Pictures of a multimodal model cost what its tower computes; the rows counted here are those of the text.
        text = module if module.config is config else module.get_decoder()
        for name, weight in text.named_parameters():
            if weight.ndim >= 2 and id(weight) not in skip:
                per_row += 2 * weight.numel() * (_visited_experts(config) if ".experts." in name else 1)
        return cls(
            per_row=per_row,
            per_head_row=2.0 * sum(weight.numel() for weight in head_weights),
            pairs=tuple(pair for name in layers for pair in MIXERS[name].pair_costs(config)),
            tower=TowerFlops.of(module),
        )

    @classmethod
    def of_config(cls, config: PretrainedConfig, trust_remote_code: bool = False) -> "ModelFlops":
        """Count a causal language model that exists as a config only: it is built without storage, no weight is read.

        Args:
            config: of the checkpoint, overrides applied.
            trust_remote_code: the user's own flag, for a class that the checkpoint brings along.

        Raises:
            ValueError: transformers has no causal language model for it, or see ``of``.
        """
        return cls.of(text_skeleton(config, trust_remote_code))

    def segments(self, start: IntArray, rows: IntArray, head_rows: IntArray) -> NDArray[np.float64]:
        """FLOPs of each of S segments, rows that follow ``start`` shared ones.

        Args:
            start, rows, head_rows: (S,) rows before the segment that it sees, rows it has, and how many of those the
                head runs on.
        """
        attention = sum(pair.flops * visible_pairs(start, rows, pair.window) for pair in self.pairs)
        return self.per_row * rows + self.per_head_row * head_rows + attention

    def forward(self, layouts: Sequence[Layout]) -> float:
        """FLOPs of one forward over all layouts."""
        return sum(self.trunk(layout) + self.per_head_row * len(layout.head_rows) for layout in layouts)

    def trunk(self, layout: Layout) -> float:
        """FLOPs of one forward without the head."""
        return self.per_row * layout.num_rows + sum(pair.flops * num_pairs(layout, pair.window) for pair in self.pairs)

    def pictures(self, patches: IntArray) -> float:
        """FLOPs of one forward of the tower over pictures of so many patches (C,)."""
        return self.tower.forward(patches) if self.tower is not None else 0.0

    def alone(self, lengths: IntArray) -> NDArray[np.float64]:
        """FLOPs (B,) of stock verl on B sequences of so many tokens: nothing shared, the head on every token."""
        return self.segments(np.zeros_like(lengths), lengths, lengths)


def _visited_experts(config: PretrainedConfig) -> float:
    """The share of its experts that a token visits."""
    total, visited = (
        next((found for name in names if (found := getattr(config, name, None))), None)
        for names in (EXPERTS, EXPERTS_PER_TOKEN)
    )
    if total is None or visited is None:
        raise ValueError(
            f"{config.model_type} has experts, and its config says neither {' nor '.join(EXPERTS_PER_TOKEN)} of how "
            "many; set ++actor_rollout_ref.model.override_config.num_experts_per_tok=<experts a token visits> and "
            "++actor_rollout_ref.model.override_config.num_experts=<experts of a layer>"
        )
    return float(np.mean(visited) / np.mean(total))  # a list has a number for every layer
