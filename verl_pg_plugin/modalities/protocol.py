"""What the engine and the validators ask of a kind of content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from tensordict import TensorDict

from verl_pg_plugin.layout.prefix_order import IntArray

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl_pg_plugin.reason import Reason


@dataclass(frozen=True)
class Content:
    """The tokens of B sequences, laid one after the other.

    Attributes:
        keys: (N,) integers; two sequences may share a row only where theirs are equal. For text the token ids.
        offsets: (B+1,) bounds of the sequences.
    """

    keys: IntArray
    offsets: IntArray


class Modality(Protocol):
    """One kind of content.

    Attributes:
        name: the key in ``MODALITIES``.
    """

    name: ClassVar[str]

    def obstacles(self, config: PretrainedConfig) -> list[Reason]:
        """Why a model with this config does not take this content, or not with shared rows; empty if it does."""

    def read(self, data: TensorDict) -> Content:
        """The content of a batch in verl's no-padding format.

        Raises:
            BatchError: it holds something else.
        """
