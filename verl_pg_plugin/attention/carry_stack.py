"""Keys, values and head outputs of rows that one micro-batch computes and others read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

LayerTensors = dict[tuple[int, int], torch.Tensor]
"""By layer, and 0 for keys or 1 for values."""


@dataclass
class CarryBlock:
    """Rows ``start .. stop`` of a chain's path. Legend: R rows, G key/value heads, D head dim, C head outputs.

    Attributes:
        key_values: (R, G, D) keys and values of each layer, rotary embedding applied.
        key_value_sums: float32 sums of their gradients over the parts that have run; empty where nothing has a
            gradient, and once their owner has taken them.
        columns: (R, C) head outputs, float32 or wider, zero at rows that hand over none.
        column_sums: (R, C) sums of their gradients.
    """

    start: int
    stop: int
    key_values: LayerTensors = field(default_factory=dict)
    key_value_sums: LayerTensors = field(default_factory=dict)
    columns: torch.Tensor | None = None
    column_sums: torch.Tensor | None = None

    def split(self, at: int) -> tuple[CarryBlock, CarryBlock]:
        """The rows before and from ``at`` on.

        The first are copied where they are less than half of what the tensors hold, and else views, so that however
        often a block is split, it holds at most twice what it has once the others are gone.
        """
        few = 2 * (at - self.start) * self._row_bytes <= self.num_bytes
        return self._rows(self.start, at, copy=few), self._rows(at, self.stop, copy=False)

    @property
    def _row_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors) // (self.stop - self.start)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        tensors = (*self.key_values.values(), *self.key_value_sums.values(), self.columns, self.column_sums)
        return [tensor for tensor in tensors if tensor is not None]

    def _rows(self, start: int, stop: int, copy: bool) -> CarryBlock:
        def part(tensor: torch.Tensor) -> torch.Tensor:
            rows = tensor[start - self.start : stop - self.start]
            return rows.clone() if copy else rows

        return CarryBlock(
            start,
            stop,
            {place: part(tensor) for place, tensor in self.key_values.items()},
            {place: part(tensor) for place, tensor in self.key_value_sums.items()},
            None if self.columns is None else part(self.columns),
            None if self.column_sums is None else part(self.column_sums),
        )

    @property
    def num_bytes(self) -> int:
        """What the block holds, rows that it no longer has included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors)


class CarryStack:
    """The rows ``0 .. num_rows`` of one path in blocks, shallow first.

    Attributes:
        peak_bytes: most that the blocks ever took.
    """

    def __init__(self) -> None:
        self.blocks: list[CarryBlock] = []
        self.peak_bytes = 0

    @property
    def num_rows(self) -> int:
        return self.blocks[-1].stop if self.blocks else 0

    def __iter__(self) -> Iterator[CarryBlock]:
        return iter(self.blocks)

    def push(self, block: CarryBlock) -> None:
        """Put rows on top.

        Raises:
            RuntimeError: they do not continue the path, so some part read or left the wrong rows.
        """
        if block.start != self.num_rows:
            raise RuntimeError(f"rows {block.start} .. {block.stop} do not continue {self.num_rows} carried rows")
        self.blocks.append(block)
        self.peak_bytes = max(self.peak_bytes, sum(block.num_bytes for block in self.blocks))

    def pop(self, keep: int) -> list[CarryBlock]:
        """Take off the rows from ``keep`` on, shallow first."""
        popped: list[CarryBlock] = []
        while self.num_rows > keep:
            block = self.blocks.pop()
            if block.start >= keep:
                popped.append(block)  # itself: what is cleared in it is cleared for whoever else still holds it
                continue
            kept, taken = block.split(keep)
            popped.append(taken)
            self.blocks.append(kept)
        return popped[::-1]
