"""Micro-batches whose rows are selected when the loop comes to them, while the device runs the one before."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tensordict import TensorDict


@dataclass(frozen=True)
class LazyMicroBatches:
    """Counted and looped over like a list. Each is made once, and kept for what is asked of it behind the loop.

    Attributes:
        make: the micro-batch with an index.
        number: of micro-batches.
        on_arrival: called when a loop comes to a micro-batch, before it is made, and to the end.
    """

    make: Callable[[int], TensorDict]
    number: int
    on_arrival: Callable[[], None] = lambda: None
    _made: list[TensorDict] = field(default_factory=list)

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[TensorDict]:
        for k in range(self.number):
            self.on_arrival()
            if k == len(self._made):
                self._made.append(self.make(k))
            yield self._made[k]
        self.on_arrival()
