"""What the engine and the validators ask of a way to mix tokens."""

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
    """How some layers of a model let tokens see earlier ones; functions of a config take that of the text."""

    name: str  # the key in ``MIXERS`` and in ``ForwardContext.calls``
    layer_types: frozenset[str]  # entries of a config's ``layer_types`` that it computes
    # Why its layers cannot share tokens; empty if they can.
    obstacles: Callable[[PretrainedConfig], list[str]] = lambda config: []
    # What this machine lacks to run them, with the command that installs it, by device type.
    machine_obstacles: Callable[[str], list[str]] = lambda device_name: []
    # Changes a config before the model is built from it.
    prepare: Callable[[PretrainedConfig], None] = lambda config: None
    # Makes the layers of an unwrapped transformers model mix packed tokens.
    install: Callable[[nn.Module], object] = lambda module: None
    # FLOPs that grow with pairs of tokens.
    pair_costs: Callable[[PretrainedConfig], tuple[PairCost, ...]] = lambda config: ()
    # Forward FLOPs of one token over all of its layers, beside pairs and weights.
    token_flops: Callable[[PretrainedConfig], float] = lambda config: 0.0
    # Over all of its layers, numbers of the float32 states at one position that later chunks of a split group read, and
    # of the other activations there.
    state_sizes: Callable[[PretrainedConfig], tuple[int, int]] = lambda config: (0, 0)
    # Models that transformers calls stateful, whose state is that of its layers alone.
    stateful_model_types: frozenset[str] = frozenset()
    # Why a Ulysses group of that many ranks, above 1, cannot share the tokens; empty if it can.
    ulysses_obstacle: Callable[[PretrainedConfig, int], str] = lambda config, ranks: (
        "tokens that are spread over ranks are not mixed"
    )
    # Whether it reads tokens that another micro-batch has computed; in a model with one that does not, each chunk of a
    # split group computes what it shares again.
    prefix_cache: bool = False
    padded_groups: bool = False  # whether it mixes the tokens of upstream's padded groups, and not packed ones only
