"""Interface between a way to mix tokens and the engine, the planner and the rules."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig


@dataclass(frozen=True)
class PairCost:
    """Cost of the (query, key) pairs of some layers."""

    flops: float  # of one pair, in the forward of all these layers
    window: int | None = None  # keys that a query sees, itself included; None for all


@dataclass(frozen=True)
class Mixer:
    """How some layers of a model mix tokens. Functions of a config take the text config."""

    name: str  # the key in ``MIXERS`` and in ``ForwardContext.calls``
    layer_types: frozenset[str]  # the entries of ``layer_types(config)``
    # Reasons why its layers cannot share tokens; empty if they can.
    obstacles: Callable[[PretrainedConfig], list[str]] = lambda config: []
    # Missing packages for a device type, each with the command that installs it.
    machine_obstacles: Callable[[str], list[str]] = lambda device_name: []
    # Changes a config before the model is built.
    prepare: Callable[[PretrainedConfig], None] = lambda config: None
    # Changes the layers of an unwrapped transformers model to mix packed tokens.
    install: Callable[[nn.Module], object] = lambda module: None
    pair_costs: Callable[[PretrainedConfig], tuple[PairCost, ...]] = lambda config: ()
    # Forward FLOPs of one token in all its layers, without pairs and weights.
    token_flops: Callable[[PretrainedConfig], float] = lambda config: 0.0
    # Elements that later chunks read at one position, in all its layers: of float32 states, of other activations.
    state_sizes: Callable[[PretrainedConfig], tuple[int, int]] = lambda config: (0, 0)
    # Models that transformers calls stateful, if only its layers have a state.
    stateful_model_types: frozenset[str] = frozenset()
    # Why a Ulysses group of this size (above 1) cannot run it; empty if it can.
    ulysses_obstacle: Callable[[PretrainedConfig, int], str] = lambda config, ranks: "they cannot run with Ulysses"
    # Whether it can read a prefix from the cache. If not, each chunk of a split group recomputes its prefix.
    prefix_cache: bool = False
    padded_groups: bool = False  # whether it also runs verl's own padded groups
