"""Gated DeltaNet as a mixer."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from verl_pg_plugin.mixers.gated_delta.kernels import kernel_obstacles
from verl_pg_plugin.mixers.gated_delta.layer import GATED_DELTA, install
from verl_pg_plugin.mixers.protocol import PairCost

LINEAR = "linear_attention"
TEXT_MODEL_TYPES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
MULTIMODAL_MODEL_TYPES = frozenset({"qwen3_5", "qwen3_5_moe"})


class GatedDelta:
    """The linear attention layers of Qwen3-Next and Qwen3.5."""

    name: ClassVar[str] = GATED_DELTA
    layer_types: ClassVar[frozenset[str]] = frozenset({LINEAR})
    stateful_model_types: ClassVar[frozenset[str]] = TEXT_MODEL_TYPES | MULTIMODAL_MODEL_TYPES
    ulysses: ClassVar[bool] = False
    prefix_cache: ClassVar[bool] = False
    padded_groups: ClassVar[bool] = False

    def obstacles(self, config: PretrainedConfig) -> list[str]:
        if config.model_type in TEXT_MODEL_TYPES:
            return []
        known = ", ".join(sorted(TEXT_MODEL_TYPES))
        return [f"{config.model_type} has linear attention that is not known to be Gated DeltaNet, as {known}"]

    def machine_obstacles(self, device_name: str) -> list[str]:
        return kernel_obstacles(device_name)

    def prepare(self, config: PretrainedConfig) -> None:
        """Nothing to do: layers are changed in the built model."""

    def install(self, module: Any) -> None:
        install(module)

    def pair_costs(self, config: PretrainedConfig) -> tuple[PairCost, ...]:
        """None: a row reads a state of fixed size, however many rows are before it."""
        return ()

    def token_flops(self, config: PretrainedConfig) -> float:
        """The recurrence with a K x V state per head: two FLOPs per number to read it, to correct it, to query it.

        The chunked kernels multiply more, to be faster; that is how they compute and not what a row needs.
        """
        layers = list(config.layer_types)[: config.num_hidden_layers].count(LINEAR)
        state = config.linear_key_head_dim * config.linear_value_head_dim
        return 6.0 * layers * config.linear_num_value_heads * state
