"""A causal LM of the first layers of one Llama and the last layers of another, joined by a trainable adapter.

    tokens -> embedding and first layers (of one model) -> adapter -> last layers, norm and head (of the other)

``scripts/assemble_split_llama.py`` makes a checkpoint with this file from two Llama checkpoints; load it with
``trust_remote_code=True``. The package verl_pg_plugin must be installed. Layers, rotary embeddings and norms are
transformers' Llama. ``PackedInputsMixin`` documents ``forward``.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, LlamaConfig, PretrainedConfig
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama import modeling_llama as llama

from verl_pg_plugin.models.packed_inputs import CACHE, PackedAttentionMixin, PackedInputsMixin, ValueHeadMixin

__all__ = ["SplitLlamaConfig", "SplitLlamaForCausalLM", "SplitLlamaForValue", "SplitLlamaModel"]


class SplitLlamaConfig(PretrainedConfig):
    """Two Llama configs; ``num_hidden_layers`` of each is the number of layers taken from it.

    Args:
        first_config: embedding and lower layers, as ``LlamaConfig`` or its dict.
        last_config: upper layers, final norm and head.

    Raises:
        ValueError: the two vocabularies differ in size.
    """

    model_type = "split_llama"
    _auto_class = "AutoConfig"  # save_pretrained puts this file into the saved checkpoint
    sub_configs = {"first_config": LlamaConfig, "last_config": LlamaConfig}  # noqa: RUF012 (transformers' annotation)

    def __init__(
        self,
        first_config: LlamaConfig | dict[str, Any] | None = None,
        last_config: LlamaConfig | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        first, last = (
            config if isinstance(config, LlamaConfig) else LlamaConfig(**(config or {}))
            for config in (first_config, last_config)
        )
        if first.vocab_size != last.vocab_size:
            raise ValueError(
                f"the two models must share a tokenizer: vocab_size is {first.vocab_size} and {last.vocab_size}"
            )
        self.first_config, self.last_config = first, last
        # Code for ordinary models reads totals, and the sizes of the stack with the head.
        self.num_hidden_layers = first.num_hidden_layers + last.num_hidden_layers
        self.max_position_embeddings = min(first.max_position_embeddings, last.max_position_embeddings)
        widths = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        for name in ("vocab_size", *widths, "initializer_range", "use_cache"):
            setattr(self, name, getattr(last, name))
        derived = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        tokens = {name: getattr(last, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        kwargs = {name: value for name, value in kwargs.items() if name not in derived}
        super().__init__(**{**tokens, "tie_word_embeddings": False, **kwargs})


class SplitLlamaAttention(PackedAttentionMixin, llama.LlamaAttention):
    """transformers' attention; with a ``prefix_grouper``, attention over shared prefixes."""


class SplitLlamaPreTrainedModel(llama.LlamaPreTrainedModel):
    """Capabilities that transformers and FSDP read."""

    config_class = SplitLlamaConfig
    _supports_flex_attn = _can_compile_fullgraph = False  # Llama has both; no test covers them
    _can_record_outputs: ClassVar[dict[str, Any]] = {}


class Stack(nn.Module):
    """Consecutive layers of one Llama with its rotary embedding; ``layer_idx`` counts through both stacks."""

    def __init__(self, config: LlamaConfig, first_layer_idx: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for layer_idx in range(first_layer_idx, first_layer_idx + config.num_hidden_layers):
            self.layers.append(llama.LlamaDecoderLayer(config, layer_idx))
            self.layers[-1].self_attn = SplitLlamaAttention(config, layer_idx)
        self.rotary_emb = llama.LlamaRotaryEmbedding(config=config)

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, position_embeddings=position_embeddings, position_ids=position_ids, **kwargs
            )
        return hidden_states


class SplitLlamaModel(SplitLlamaPreTrainedModel):
    """Embedding, first stack, adapter, last stack and final norm."""

    def __init__(self, config: SplitLlamaConfig) -> None:
        super().__init__(config)
        config._attn_implementation = config._attn_implementation  # the setter also sets the stacks' configs
        first, last = config.first_config, config.last_config
        self.embed_tokens = nn.Embedding(first.vocab_size, first.hidden_size, config.pad_token_id)
        self.first = Stack(first, first_layer_idx=0)
        self.adapter = nn.Linear(first.hidden_size, last.hidden_size, bias=False)
        self.last = Stack(last, first_layer_idx=first.num_hidden_layers)
        self.norm = llama.LlamaRMSNorm(last.hidden_size, eps=last.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return (B, T, hidden size of the last stack); arguments as in transformers' ``LlamaModel``."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = kwargs.pop(CACHE, None)
        if use_cache and cache is None:
            cache = DynamicCache()
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(seen, seen + hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        if isinstance(attention_mask, dict):
            mask = attention_mask["full_attention"]
        else:
            inputs = {"inputs_embeds": hidden_states, "attention_mask": attention_mask, "position_ids": position_ids}
            mask = create_causal_mask(config=self.config, **inputs, **{CACHE: cache})
        rest = {"attention_mask": mask, CACHE: cache, "use_cache": use_cache, **kwargs}
        hidden_states = self.first(hidden_states, position_ids, **rest)
        hidden_states = self.last(self.adapter(hidden_states), position_ids, **rest)
        output = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=output, **{CACHE: cache if use_cache else None})


class SplitLlamaForCausalLM(PackedInputsMixin, SplitLlamaPreTrainedModel, GenerationMixin):
    """Split Llama with a language-model head."""

    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config: SplitLlamaConfig) -> None:
        super().__init__(config)
        self.model = SplitLlamaModel(config)
        self._init_head(config)
        self.post_init()


class SplitLlamaForValue(ValueHeadMixin, SplitLlamaForCausalLM):
    """Split Llama with one value per token as ``logits``."""

    _auto_class = "AutoModelForTokenClassification"
