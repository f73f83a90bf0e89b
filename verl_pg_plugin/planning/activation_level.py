"""Which activation level a micro-batch takes."""

from __future__ import annotations

from enum import Enum


class Level(Enum):
    """What a decoder layer keeps for its backward, and where it waits; gradients are alike to the bit.

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
