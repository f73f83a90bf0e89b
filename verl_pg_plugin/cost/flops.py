"""FLOPs of the rows that are really computed."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from verl_pg_plugin.layout import Layout


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a decoder, counted from its weights: two per weight and row, four per head dim and attention pair.

    Attributes:
        per_row: forward FLOPs of a row outside attention scores and head.
        per_head_row: forward FLOPs of the LM or value head on one row.
        per_pair: forward FLOPs of one (query, key) pair over all layers.
    """

    per_row: float
    per_head_row: float
    per_pair: float

    @classmethod
    def of(cls, module: nn.Module) -> "ModelFlops":
        """Count the matrices of an unsharded transformers model."""
        config = module.config.get_text_config()
        head = module.get_output_embeddings()
        skip = {
            id(weight)
            for part in (head, module.get_input_embeddings())
            if part is not None
            for weight in part.parameters()
        }
        active = getattr(config, "num_experts_per_tok", None) or 1
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
        per_row = 0.0
        for name, weight in module.named_parameters():
            if weight.ndim >= 2 and id(weight) not in skip:
                per_row += 2 * weight.numel() * (active / experts if ".experts." in name else 1)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            per_row=per_row,
            per_head_row=2 * sum(weight.numel() for weight in head.parameters()) if head is not None else 0.0,
            per_pair=4 * head_dim * config.num_attention_heads * config.num_hidden_layers,
        )

    def forward(self, layouts: Sequence[Layout]) -> float:
        """FLOPs of one forward over all layouts."""
        return sum(
            self.trunk(layout.num_rows, layout.num_attention_pairs) + self.per_head_row * len(layout.head_rows)
            for layout in layouts
        )

    def trunk(self, num_rows: int, num_attention_pairs: int) -> float:
        """FLOPs of one forward without the head."""
        return self.per_row * num_rows + self.per_pair * num_attention_pairs
