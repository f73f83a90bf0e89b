"""What the engine and the validators ask of a way to mix tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig


@dataclass(frozen=True)
class PairCost:
    """(query, key) pairs of some layers."""

    flops: float  # of the forward, of one pair over all of them
    window: int | None = None  # keys that a query sees, itself included; None for all


@dataclass(frozen=True)
class Mixer:
    """How some layers of a model let tokens see earlier ones; functions of a config take that of the text.

    Attributes:
        name: the key in ``MIXERS`` and in ``AttentionContext.calls``.
        layer_types: entries of a config's ``layer_types`` that it computes.
        obstacles: why its layers cannot share tokens, by config; empty if they can.
        machine_obstacles: what this machine lacks to run them, with the command that installs it, by device type.
        prepare: changes a config before the model is built from it.
        install: makes the layers of an unwrapped transformers model mix packed tokens.
        pair_costs: FLOPs that grow with pairs of tokens, by config.
        state_sizes: numbers of the float32 states at one position that later chunks of a split group read, and of the
            other activations there, over all of its layers, by config.
        token_flops: forward FLOPs of one token over all of its layers, beside pairs and weights, by config.
        stateful_model_types: models that transformers calls stateful, whose state is that of its layers alone.
        ulysses_obstacle: why a Ulysses group of that many ranks, above 1, cannot share the tokens, by config and ranks;
            empty if it can.
        prefix_cache: whether it reads tokens that another micro-batch has computed; in a model with one that does not,
            each chunk of a split group computes what it shares again.
        padded_groups: whether it mixes the tokens of upstream's padded groups, and not packed ones only.
    """

    name: str
    layer_types: frozenset[str]
    obstacles: Callable[[PretrainedConfig], list[str]] = lambda config: []
    machine_obstacles: Callable[[str], list[str]] = lambda device_name: []
    prepare: Callable[[PretrainedConfig], None] = lambda config: None
    install: Callable[[nn.Module], object] = lambda module: None
    pair_costs: Callable[[PretrainedConfig], tuple[PairCost, ...]] = lambda config: ()
    token_flops: Callable[[PretrainedConfig], float] = lambda config: 0.0
    state_sizes: Callable[[PretrainedConfig], tuple[int, int]] = lambda config: (0, 0)
    stateful_model_types: frozenset[str] = frozenset()
    ulysses_obstacle: Callable[[PretrainedConfig, int], str] = lambda config, ranks: (
        "tokens that are spread over ranks are not mixed"
    )
    prefix_cache: bool = False
    padded_groups: bool = False
