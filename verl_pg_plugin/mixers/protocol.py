"""What a way of mixing tokens says about itself."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from transformers import PretrainedConfig


@dataclass(frozen=True)
class PairCost:
    """(query, key) pairs of some layers: forward FLOPs of one pair over all of them, and the window they see."""

    flops: float
    window: int | None = None


class Mixer(Protocol):
    """One way in which layers mix tokens."""

    name: ClassVar[str]

    def pair_costs(self, config: PretrainedConfig) -> tuple[PairCost, ...]:
        """Pair costs of the layers of a text config that mix tokens this way."""
        ...
