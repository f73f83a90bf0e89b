"""Memory model of an update: bytes of a token by activation level, and bytes of weights.

Computed from the sizes in a config, within 3% of the peaks measured on H200s.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from verl_pg_plugin.attention.plan import GATHERED_IN_BACKWARD
from verl_pg_plugin.mixers import MIXERS, count_layers
from verl_pg_plugin.mixers.attention import ATTENTION, attention_needs
from verl_pg_plugin.planning.activation_level import Level
from verl_pg_plugin.planning.cost import EXPERTS_PER_TOKEN


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of a token in one layer. Every layer counts as attention, except for the cache."""

    layers: int  # number of layers
    inputs: int  # the layer's inputs, which every level saves
    attention: int  # the attention kernel's output and log-sum-exp
    rest: int  # everything else that the layer's backward reads
    gradients: int  # peak of gradients and gathered KV during the layer's backward
    caching_layers: int  # number of layers with cached keys and values
    key_value: int  # keys and values
    sums: int  # float32 gradient sums of keys and values that other micro-batches read
    state: int  # cached states of all recurrent layers at one position
    state_sums: int  # float32 gradient sums of these states
    logits: int  # logits of a token that runs the LM head, for a head that holds all at once

    @classmethod
    def of(
        cls, config: PretrainedConfig, itemsize: int = 2, compiled: bool = True, lm_head: bool = True
    ) -> "TokenBytes | None":
        """Count from a text config, with ``itemsize`` bytes per element; None if it does not name the sizes.

        Layers that are not ``compiled`` hold more in their backward. A critic has no ``lm_head``.
        """
        hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
        if not hidden or not heads:
            return None

        def size(name: str, otherwise: int) -> int:
            return int(np.mean(getattr(config, name, None) or otherwise))  # a list where layers differ

        kv_heads, inner = size("num_key_value_heads", heads), size("intermediate_size", 4 * hidden)
        visited = next((int(np.mean(n)) for name in EXPERTS_PER_TOKEN if (n := getattr(config, name, None))), 0)
        if visited:
            inner = visited * size("moe_intermediate_size", inner)
        key_width, value_width = max(attention_needs(config).head_dims)
        width = max(key_width, value_width)  # values are padded to the width of keys
        keys, key_value = (heads + kv_heads) * key_width, kv_heads * (key_width + width)
        # Inputs of norms and matrices, queries and keys before and after the rotary embedding, values, three MLP
        # activations, inputs and outputs of the experts, and the norms' factors.
        mlp = 3 * inner + 2 * visited * hidden
        rest = 3 * hidden + 2 * keys + kv_heads * value_width + mlp
        mixers = count_layers(config)
        states, inputs = map(sum, zip((0, 0), *(MIXERS[name].state_sizes(config) for name in mixers), strict=True))
        in_mlp = 2 * inner + visited * hidden + (0 if compiled else inner + 2 * hidden)
        # In attention's backward the MLP's activations are freed. It holds gradients of the residual, the output,
        # queries (also in float32), keys and values. Per gathered key: key, value, the gradients of both and those of
        # each query head.
        gathered = GATHERED_IN_BACKWARD * 2 * (key_value + heads * width)
        in_attention = hidden + 4 * heads * width + key_value + gathered - mlp
        norms = 0 if compiled else 2 * hidden + 2 * keys  # attention's norms, in float32
        return cls(
            layers=config.num_hidden_layers,
            inputs=itemsize * hidden,
            attention=heads * (itemsize * width + 4),
            rest=itemsize * rest + 4 * (2 + heads + kv_heads),
            gradients=itemsize * (max(in_mlp, in_attention) + norms),
            caching_layers=mixers[ATTENTION],
            key_value=key_value * itemsize,
            sums=key_value * max(itemsize, 4),
            state=4 * states + itemsize * inputs,
            state_sums=4 * (states + inputs),
            logits=itemsize * config.vocab_size * lm_head,
        )

    def saved(self, level: Level) -> int:
        """Bytes of a token that all layers save for the backward, on the device or the host."""
        rest = self.rest if level is Level.ALL else 0
        return self.layers * (self.inputs + (self.attention if level.keeps_attention else 0) + rest)

    def on_device(self, level: Level) -> int:
        """Peak bytes of a token on the device: saved ones, and those of the layer whose backward runs."""
        # Two layers of a level on the host are on the device at once.
        saved = 2 * self.saved(level) // self.layers if level.on_host else self.saved(level)
        return saved + self.gradients + (3 * self.inputs if level is Level.ALL else self.attention + self.rest)

    def cache_bytes(self, cached: int = 0, pending: int = 0, states: int = 0, pending_states: int = 0) -> int:
        """Bytes of the tokens and states that a chunk reads, and of pending gradients of those it publishes."""
        of_tokens = self.caching_layers * (cached * (self.key_value + self.sums) + pending * self.sums)
        return of_tokens + states * (self.state + self.state_sums) + pending_states * self.state_sums


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of weights, gradients and optimizer states on each of the GPUs that FSDP shards a model over.

    verl's defaults are assumed: float32 weights, gradients and AdamW, bfloat16 activations.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float  # layers, embedding and LM head unsharded at the peak, with their gradient buffers
    head: float  # gradient of a trained LM head and one chunk of logits; 0 without a head

    @classmethod
    def of(
        cls, model: Any, num_gpus: int, chunk: int = 2048, *, keeps_weights: bool = False, keeps_gradients: bool = False
    ) -> "WeightBytes":
        """Count a model with its adapters before it is sharded over ``num_gpus``; ``meta`` tensors suffice.

        ``chunk`` is the tokens whose logits are held at once; 0 for all, which ``TokenBytes.logits`` counts. FSDP may
        keep weights unsharded until the backward, and gradients until the last micro-batch.
        """
        config = model.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        hidden = getattr(config, "hidden_size", None) or 0
        vocabulary = config.vocab_size * int(np.mean(hidden))  # a list where layers differ
        weights, trained = _numbers(model), _numbers(model, trained=True)
        layer = (weights - vocabulary) / layers
        lm_head = model.get_output_embeddings()
        head = 4.0 * (_numbers(lm_head, trained=True) + config.vocab_size * chunk) if lm_head is not None else 0.0
        # Two layers: bfloat16 weights, and gradients once in bfloat16 and twice in float32.
        gathered = 2 * weights if keeps_weights else 2 * vocabulary + 4 * layer
        gathered += 10 * min(layer, trained / layers) + (4 * trained * (num_gpus - 1) / num_gpus) * keeps_gradients
        own, gradients = 4 * weights / num_gpus, 4 * trained / num_gpus
        return cls(own, gradients, 2 * gradients, gathered, head)


def _numbers(module: Any, trained: bool = False) -> int:
    """Number of a module's parameters, or of its trained ones."""
    return sum(weight.numel() for weight in module.parameters() if weight.requires_grad or not trained)
