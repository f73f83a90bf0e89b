"""What the engine, the validators and the cost model ask of a way in which layers mix tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class PairCost:
    """(query, key) pairs of some layers.

    Attributes:
        flops: forward FLOPs of one pair over all of them.
        window: keys that a query sees, itself included; None for all.
    """

    flops: float
    window: int | None = None


class Mixer(Protocol):
    """One way in which a layer lets tokens see earlier ones, over packed tokens.

    A layer that mixes tokens hands what it returns through ``AttentionContext.mixed``, outside of compiled code
    (``torch.compiler.disable``): index maps differ in every micro-batch.

    Attributes:
        name: the key in ``MIXERS`` and in ``AttentionContext.calls``.
        layer_types: entries of a config's ``layer_types`` that it computes.
        stateful_model_types: models that transformers calls stateful, whose state is that of its layers alone.
        ulysses: whether it mixes tokens of a Ulysses group.
        prefix_cache: whether it reads tokens that another micro-batch has computed; in a model with one that does not,
            each chunk of a split group computes what it shares again.
        padded_groups: whether it mixes the tokens of upstream's padded groups, and not packed ones only.
    """

    name: ClassVar[str]
    layer_types: ClassVar[frozenset[str]]
    stateful_model_types: ClassVar[frozenset[str]]
    ulysses: ClassVar[bool]
    prefix_cache: ClassVar[bool]
    padded_groups: ClassVar[bool]

    def obstacles(self, config: PretrainedConfig) -> list[str]:
        """Why its layers in a model with this text config cannot share tokens; empty if they can."""

    def machine_obstacles(self, device_name: str) -> list[str]:
        """What this machine lacks to run its layers on such a device, and the command that installs it."""

    def prepare(self, config: PretrainedConfig) -> None:
        """Change the config before the model is built from it."""

    def install(self, module: Any) -> None:
        """Make the layers of an unwrapped transformers model mix packed tokens."""

    def pair_costs(self, config: PretrainedConfig) -> tuple[PairCost, ...]:
        """FLOPs that grow with pairs of tokens, of its layers in a model with this text config."""

    def token_flops(self, config: PretrainedConfig) -> float:
        """Forward FLOPs of one token over all of its layers, beside pairs and weights."""
