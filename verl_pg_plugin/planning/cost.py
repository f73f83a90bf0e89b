"""FLOPs of tokens: one cost model for micro-batches, balance, metrics and ``estimate``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from transformers import PretrainedConfig

from verl_pg_plugin.layout import FloatArray, IntArray, Layout
from verl_pg_plugin.mixers import MIXERS, PairCost, count_layers
from verl_pg_plugin.modalities import IMAGE_MODEL_TYPES, Images

FORWARDS_OF_AN_UPDATE = 3
"""FLOPs of an update over those of its forward: a backward has two matrix products for each of the forward's."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""Names of these fields in transformers' configs."""
AFTER_MERGING = ("merger", "downsample", "multi_modal_projector")
"""Parts of vision encoders that run once for the patches of a token."""


def visible_pairs(start: IntArray, tokens: IntArray, window: int | None = None) -> IntArray:
    """Return the number of causal (query, key) pairs of segments with ``tokens`` (S,) tokens from ``start`` (S,) on.

    ``window`` counts the query itself, as ``sliding_window`` of transformers does; None for no window.
    """

    def pairs_up_to(stop: IntArray) -> IntArray:
        growing = stop if window is None else np.minimum(stop, window)  # queries that see all keys before them
        return growing * (growing + 1) // 2 + (stop - growing) * (window or 0)

    return pairs_up_to(start + tokens) - pairs_up_to(start)


@dataclass(frozen=True)
class VisionFlops:
    """Forward FLOPs of a vision encoder with bidirectional attention within each image."""

    per_patch: float  # excluding attention scores
    pairs: tuple[tuple[int | None, float], ...]  # window in patches (None: the image), FLOPs of a pair in such blocks

    @classmethod
    def of(cls, module: Any) -> "VisionFlops | None":
        """Count the matrices of an unsharded transformers model; None if the plugin shares no images of it."""
        if getattr(module.config, "model_type", None) not in IMAGE_MODEL_TYPES:
            return None
        config, patches_per_token = module.config.vision_config, Images.of(module.config).merge_size ** 2
        lookups = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
        per_patch = 0.0
        for name, weight in module.model.named_parameters():
            other = id(weight) in lookups or any(part in name for part in ("language_model.", "position_embedding"))
            if weight.ndim >= 2 and not other:
                merged = patches_per_token if any(part in name for part in AFTER_MERGING) else 1
                per_patch += 2 * weight.numel() / merged
        depth = getattr(config, "depth", None) or config.num_hidden_layers
        whole = getattr(config, "fullatt_block_indexes", range(depth))
        window = (config.window_size // config.patch_size) ** 2 if len(whole) < depth else None
        per_pair = 4.0 * getattr(config, "embed_dim", config.hidden_size)  # hidden_size: the text's in Qwen2-VL
        pairs = ((None, per_pair * len(whole)), (window, per_pair * (depth - len(whole))))
        return cls(per_patch, tuple(pair for pair in pairs if pair[1]))

    def forward(self, patches: IntArray) -> float:
        """FLOPs of one forward over images with ``patches`` (C,) patches each."""
        total = self.per_patch * float(patches.sum())
        for window, flops in self.pairs:
            seen = patches if window is None else np.minimum(patches, window)
            total += flops * float((patches * seen).sum())
        return total


@dataclass(frozen=True)
class ModelFlops:
    """Forward FLOPs of a decoder: two per weight and token, plus those of (query, key) pairs."""

    per_token: float  # excluding attention scores and the LM or value head
    per_label: float  # the head on one token
    pairs: tuple[PairCost, ...]  # one entry per window
    vision: VisionFlops | None = None  # None for text models
    unknown: str = ""  # why tokens are counted instead of FLOPs; empty otherwise

    @classmethod
    def or_tokens(cls, build: Callable[[], nn.Module]) -> "ModelFlops":
        """Count the model that ``build`` returns, or count tokens and set ``unknown``, which callers log."""
        try:
            flops = cls.of(build())
            one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
            if (flops.attention(none, one) < 0).any():
                raise ValueError(f"attention windows are {[pair.window for pair in flops.pairs]}")
            return flops
        except Exception as error:  # a model class may raise anything, and an estimate must end no run
            cause = f"cannot be counted ({type(error).__name__}: {' '.join(str(error).split())})"
            return cls(per_token=1.0, per_label=0.0, pairs=(), unknown=cause)

    @classmethod
    def of(cls, module: nn.Module) -> "ModelFlops":
        """Count the matrices of an unsharded transformers model, which may be on ``meta``.

        ValueError if the config does not say how many of the experts a token visits.
        """
        config = module.config.get_text_config()
        head = module.get_output_embeddings() or getattr(module, "score", None)  # value models, token classifiers
        head_weights = [] if head is None else list(head.parameters())
        lookups = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
        skip = {id(weight) for weight in (*head_weights, *lookups)}
        layers = count_layers(config)
        per_token = sum(MIXERS[name].token_flops(config) for name in layers)
        # The vision encoder is counted by ``VisionFlops``.
        text = module if module.config is config else module.get_decoder()
        for name, weight in text.named_parameters():
            if weight.ndim >= 2 and id(weight) not in skip:
                per_token += 2 * weight.numel() * (_visited_experts(config) if ".experts." in name else 1)
        return cls(
            per_token=per_token,
            per_label=2.0 * sum(weight.numel() for weight in head_weights),
            pairs=tuple(pair for name in layers for pair in MIXERS[name].pair_costs(config)),
            vision=VisionFlops.of(module),
        )

    def attention(self, start: IntArray, tokens: IntArray) -> FloatArray:
        """Attention FLOPs (S,) of segments with ``tokens`` (S,) tokens after ``start`` (S,) shared ones."""
        return np.asarray(sum(pair.flops * visible_pairs(start, tokens, pair.window) for pair in self.pairs))

    def segments(self, start: IntArray, tokens: IntArray, labels: IntArray) -> FloatArray:
        """FLOPs (S,) of segments whose head runs on ``labels`` (S,) tokens; see ``attention``."""
        return self.per_token * tokens + self.per_label * labels + self.attention(start, tokens)

    def forward(self, layouts: Sequence[Layout]) -> float:
        """FLOPs of one forward over all layouts."""
        return sum(self.without_head(layout) + self.per_label * len(layout.head_index) for layout in layouts)

    def without_head(self, layout: Layout) -> float:
        """FLOPs of one forward over a layout, head excluded."""
        return self.per_token * layout.num_tokens + float(self.attention(*layout.segments).sum())

    def images(self, patches: IntArray) -> float:
        """FLOPs of one forward of the vision encoder; see ``VisionFlops.forward``."""
        return self.vision.forward(patches) if self.vision is not None else 0.0

    def alone(self, lengths: IntArray) -> FloatArray:
        """FLOPs (B,) of stock verl on sequences of ``lengths`` (B,): unshared, with the head on every token."""
        return self.segments(np.zeros_like(lengths), lengths, lengths)


def _visited_experts(config: PretrainedConfig) -> float:
    """Fraction of a layer's experts that a token visits."""
    total, visited = (
        next((number for name in names if (number := getattr(config, name, None))), None)
        for names in (EXPERTS, EXPERTS_PER_TOKEN)
    )
    if total is None or visited is None:
        override = "++actor_rollout_ref.model.override_config"
        raise ValueError(
            f"{config.model_type} has experts, and its config needs one of {', '.join(EXPERTS_PER_TOKEN)} and one of "
            f"{', '.join(EXPERTS)}. Fix: {override}.num_experts_per_tok=<experts a token visits> "
            f"{override}.num_experts=<experts of a layer>"
        )
    return float(np.mean(visited) / np.mean(total))  # a list has one number per layer
