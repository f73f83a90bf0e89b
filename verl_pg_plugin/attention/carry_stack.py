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
        """The rows before and from ``at`` on: a copy of the fewer, and a view of the others, which holds all memory.

        Neither keeps more than twice what it has, once the other is gone.
        """
        copies = at - self.start <= self.stop - at, self.stop - at < at - self.start
        return self._rows(self.start, at, copies[0]), self._rows(at, self.stop, copies[1])

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
        tensors = (*self.key_values.values(), *self.key_value_sums.values(), self.columns, self.column_sums)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)


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
