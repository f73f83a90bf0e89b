"""Activation levels and the memory budget for activations."""

from dataclasses import dataclass
from enum import Enum

DEVICE_RESERVE = 0.08
"""Fraction of device memory that stays free for fragmentation and for what the estimates omit."""


class Level(Enum):
    """Activations that a decoder layer saves for its backward. Gradients are bit-identical for the same chunks.

    ``ALL`` saves every activation. ``ATTENTION`` saves the layer's inputs, attention's output and its log-sum-exp.
    ``INPUTS`` saves the inputs only. The ``ON_HOST`` levels move what they save to host memory.
    """

    ALL = "all"
    ATTENTION = "attention"
    ATTENTION_ON_HOST = "attention_on_host"
    INPUTS = "inputs"
    INPUTS_ON_HOST = "inputs_on_host"

    @property
    def on_host(self) -> bool:
        return self.value.endswith("_on_host")

    @property
    def keeps_attention(self) -> bool:
        return not self.value.startswith("inputs")


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes available for activations on the device and on the host.

    ``reserve`` is device memory kept free for fragmentation and the LM head. A group may use it when even one of its
    sequences needs it.
    """

    device: float
    host: float
    reserve: float = 0.0
