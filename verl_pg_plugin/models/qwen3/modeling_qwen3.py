"""Qwen3 that computes every shared prompt once and never a padding token.

Copy this file next to a Qwen3 checkpoint's ``config.json``, add

    "auto_map": {
        "AutoModelForCausalLM": "modeling_qwen3.Qwen3ForCausalLM",
        "AutoModelForTokenClassification": "modeling_qwen3.Qwen3ForValue"
    }

and load with ``trust_remote_code=True``; ``python -m verl_pg_plugin patch-model CHECKPOINT_DIR`` does both. The
package verl_pg_plugin must be installed; weights and everything not defined here are those of transformers' Qwen3.

What it adds to transformers' model:
- ``prefix_grouper`` goes through ``forward`` down to attention. It is a ``prefix_grouper.PrefixGrouper`` (padded
  samples of whole groups, two attention passes) or a ``verl_pg_plugin.layout.PackedLayout`` (packed tokens, one pass).
- ``forward(input_ids, attention_mask)`` drops the padding, runs packed tokens and pads the result back.
- Packed tokens are spread over verl's Ulysses sequence-parallel group where one is set.
- The head is behind ``_init_head`` and ``_forward_head``; the value model overrides these two and nothing else.
"""

from typing import Any

import torch
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from verl_pg_plugin.attention.interface import packed_attention
from verl_pg_plugin.models.packed_inputs import PackedInputsMixin, ValueHeadMixin

__all__ = ["Qwen3ForCausalLM", "Qwen3ForValue"]


class Qwen3Attention(qwen3.Qwen3Attention):
    """Transformers' attention; with a ``prefix_grouper``, attention over shared prefixes."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        prefix_grouper: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            hidden_states: (B, T, hidden size).
            position_embeddings: cosines and sines, (B, T, head dim) each.
            attention_mask: for transformers' attention; None with a ``prefix_grouper``.
            prefix_grouper: see ``packed_attention``; None runs transformers' attention.
            kwargs: of transformers' attention; a cache among them is None with a ``prefix_grouper``.

        Returns:
            (B, T, hidden size), and the attention weights where transformers computes them.
        """
        if prefix_grouper is None:
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        by_head = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(by_head)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(by_head)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(by_head).transpose(1, 2)
        query, key = qwen3.apply_rotary_pos_emb(query, key, *position_embeddings)
        out, _ = packed_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            prefix_grouper,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(out.flatten(2)), None


class Qwen3ForCausalLM(PackedInputsMixin, qwen3.Qwen3ForCausalLM):
    """Qwen3 with a language-model head; ``forward`` is documented in ``PackedInputsMixin``."""

    _auto_class = "AutoModelForCausalLM"  # save_pretrained puts this file into the saved checkpoint

    def __init__(self, config: Qwen3Config) -> None:
        # Past transformers' own constructor, which would build the LM head.
        qwen3.Qwen3PreTrainedModel.__init__(self, config)
        self.model = qwen3.Qwen3Model(config)
        for layer_idx, layer in enumerate(self.model.layers):
            layer.self_attn = Qwen3Attention(config, layer_idx)
        self.vocab_size = config.vocab_size
        self._init_head(config)
        self.post_init()


class Qwen3ForValue(ValueHeadMixin, Qwen3ForCausalLM):
    """Qwen3 with one value per token as ``logits``; reads checkpoints of ``Qwen3ForTokenClassification`` too."""

    _auto_class = "AutoModelForTokenClassification"
