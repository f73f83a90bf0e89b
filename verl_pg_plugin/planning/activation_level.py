"""Activation levels, and the memory that activations may take."""

from dataclasses import dataclass
from enum import Enum

DEVICE_RESERVE = 0.08
"""Share of a device that stays free: gaps between blocks, and what sizes do not cover."""


class Level(Enum):
    """What a decoder layer keeps for its backward, and where it waits; gradients are alike to the bit where cuts are.

    ``ALL``: everything, nothing is computed again. ``ATTENTION``: its inputs, and the output and log-sum-exp of the
    attention kernel. ``INPUTS``: its inputs alone. ``ON_HOST``: what is kept waits in memory of the host.
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
    """Bytes that activations may take on the device and in memory of the host, and what the device keeps in reserve.

    The reserve is for gaps between blocks and for the LM head. A group takes it where even one sequence needs it.
    """

    device: float
    host: float
    reserve: float = 0.0
