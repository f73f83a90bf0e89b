"""Bytes of an update from the sizes in a config: of a token by activation level, and beside tokens on a device.

They meet the peaks that were measured on H200s within 3%.
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
    """Bytes of a token in one of a model's layers, every layer counted as attention where nothing else is said."""

    layers: int  # of the model
    inputs: int  # of a layer, which checkpointing keeps at the least
    attention: int  # the attention kernel's output and log-sum-exp
    rest: int  # all else that a layer's backward reads
    gradients: int  # the most of them, and of what attention gathers, that stand beside all of that
    caching_layers: int  # of the model, those whose keys and values are cached
    key_value: int  # its keys and values
    sums: int  # float32 sums of the gradients of both, where other micro-batches add to them
    state: int  # what recurrent layers cache at a position where other micro-batches go on, over all of them
    state_sums: int  # float32 sums of the gradients of that
    logits: int  # of a token that runs the LM head, where all logits are held at once

    @classmethod
    def of(
        cls, config: PretrainedConfig, itemsize: int = 2, compiled: bool = True, lm_head: bool = True
    ) -> "TokenBytes | None":
        """Count from a text config, with ``itemsize`` bytes a number; None if it does not name the sizes.

        Layers that are not ``compiled`` hold more while they run backwards. A critic has no ``lm_head``.
        """
        hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
        if not hidden or not heads:
            return None

        def size(name: str, otherwise: int) -> int:
            return int(np.mean(getattr(config, name, None) or otherwise))  # a list where layers differ

        kv_heads, inner = size("num_key_value_heads", heads), size("intermediate_size", 4 * hidden)
        visited = next((int(np.mean(found)) for name in EXPERTS_PER_TOKEN if (found := getattr(config, name, None))), 0)
        if visited:
            inner = visited * size("moe_intermediate_size", inner)
        key_width, value_width = max(attention_needs(config).head_dims)
        width = max(key_width, value_width)  # narrower values are kept as wide as keys
        keys, numbers = (heads + kv_heads) * key_width, kv_heads * (key_width + width)
        # Inputs of the norms and matrices, queries and keys on both sides of the rotation, values, the MLP's three;
        # tokens gathered for their experts, and what these return; factors of the norms.
        mlp = 3 * inner + 2 * visited * hidden
        rest = 3 * hidden + 2 * keys + kv_heads * value_width + mlp
        mixers = count_layers(config)
        states, inputs = map(sum, zip((0, 0), *(MIXERS[name].state_sizes(config) for name in mixers), strict=True))
        beside_mlp = 2 * inner + visited * hidden + (0 if compiled else inner + 2 * hidden)
        # What the MLP kept has gone. Gradients of the residual, the output, queries, these in float32, keys and values;
        # of a gathered key itself, its value, the gradients of both, and those of each query head.
        gathered = GATHERED_IN_BACKWARD * 2 * (numbers + heads * width)
        beside = max(beside_mlp, hidden + 4 * heads * width + numbers + gathered - mlp)
        norms = 0 if compiled else 2 * hidden + 2 * keys  # of attention, in float32
        return cls(
            layers=config.num_hidden_layers,
            inputs=itemsize * hidden,
            attention=heads * (itemsize * width + 4),
            rest=itemsize * rest + 4 * (2 + heads + kv_heads),
            gradients=itemsize * (beside + norms),
            caching_layers=mixers[ATTENTION],
            key_value=numbers * itemsize,
            sums=numbers * max(itemsize, 4),
            state=4 * states + itemsize * inputs,
            state_sums=4 * (states + inputs),
            logits=itemsize * config.vocab_size * lm_head,
        )

    def held(self, level: Level) -> int:
        """Over all layers, between forward and backward, wherever it waits."""
        rest = self.rest if level is Level.ALL else 0
        return self.layers * (self.inputs + (self.attention if level.keeps_attention else 0) + rest)

    def waiting(self, level: Level) -> int:
        """The part of ``held`` that is on the device: of what waits on the host that of two layers."""
        return 2 * self.held(level) // self.layers if level.on_host else self.held(level)

    def working(self, level: Level) -> int:
        """Of the one layer that runs backwards."""
        return self.gradients + (3 * self.inputs if level is Level.ALL else self.attention + self.rest)

    def on_device(self, level: Level) -> int:
        """At the peak, in the backward of a layer."""
        return self.waiting(level) + self.working(level)

    def beside(self, cached: int = 0, pending: int = 0, states: int = 0, pending_states: int = 0) -> int:
        """Of a chunk of a split group: tokens and states that it reads, and those that it computes for later chunks."""
        of_tokens = self.caching_layers * (cached * (self.key_value + self.sums) + pending * self.sums)
        return of_tokens + states * (self.state + self.state_sums) + pending_states * self.state_sums


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's weights and what comes with them, on one of the GPUs that FSDP spreads it over.

    As verl's trainers set it: float32 weights, gradients and AdamW, bfloat16 activations.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float  # layers, embedding and LM head that are whole at the peak, and buffers of their gradients
    head: float  # the gradient of an LM head that is trained and a chunk of logits; 0 without one

    @classmethod
    def of(
        cls, model: Any, num_gpus: int, chunk: int = 2048, *, keeps_weights: bool = False, keeps_gradients: bool = False
    ) -> "WeightBytes":
        """Count a model, with adapters if it has them, before it is sharded over ``num_gpus``; on ``meta`` too.

        ``chunk`` is tokens whose logits are held at once; 0 if all are, which ``TokenBytes.logits`` counts. What
        FSDP ``keeps`` is whole: weights until the backward, gradients until the last micro-batch.
        """
        config = model.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        vocabulary = config.vocab_size * (getattr(config, "hidden_size", None) or 0)
        weights, trained = _numbers(model), _numbers(model, trained=True)
        layer = (weights - vocabulary) / layers
        lm_head = model.get_output_embeddings()
        head = 4.0 * (_numbers(lm_head, trained=True) + config.vocab_size * chunk) if lm_head is not None else 0.0
        # Of two layers bfloat16 weights, and gradients in bfloat16 and twice in float32.
        gathered = 2 * weights if keeps_weights else 2 * vocabulary + 4 * layer
        gathered += 10 * min(layer, trained / layers) + (4 * trained * (num_gpus - 1) / num_gpus) * keeps_gradients
        own, gradients = 4 * weights / num_gpus, 4 * trained / num_gpus
        return cls(own, gradients, 2 * gradients, gathered, head)


def _numbers(module: Any, trained: bool = False) -> int:
    """Of its weights, or of those that are trained."""
    return sum(weight.numel() for weight in module.parameters() if weight.requires_grad or not trained)
