"""Qwen3 that computes every shared prompt once and no padding.

Copy this file next to a Qwen3 checkpoint's ``config.json``, add

    "auto_map": {
        "AutoModelForCausalLM": "modeling_qwen3.Qwen3ForCausalLM",
        "AutoModelForTokenClassification": "modeling_qwen3.Qwen3ForValue"
    }

and load with ``trust_remote_code=True``; ``python -m verl_pg_plugin patch-model CHECKPOINT_DIR`` does both. The
package verl_pg_plugin must be installed; weights and everything not defined here are those of transformers' Qwen3.

``PackedInputsMixin`` documents ``forward``.
"""

from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from verl_pg_plugin.models.packed_inputs import PackedAttentionMixin, PackedInputsMixin, ValueHeadMixin

__all__ = ["Qwen3ForCausalLM", "Qwen3ForValue"]


class Qwen3Attention(PackedAttentionMixin, qwen3.Qwen3Attention):
    """transformers' attention; with a ``prefix_grouper``, attention over shared prefixes."""


class Qwen3ForCausalLM(PackedInputsMixin, qwen3.Qwen3ForCausalLM):
    """Qwen3 with a language-model head."""

    _auto_class = "AutoModelForCausalLM"  # save_pretrained puts this file into the saved checkpoint

    def __init__(self, config: Qwen3Config) -> None:
        # Not transformers' own constructor, which would build the LM head.
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
