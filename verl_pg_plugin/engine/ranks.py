"""What ranks tell each other; an error on one of them is raised on all.

A mini-batch has one agreement, in front of its first forward. What fails later fails on its rank alone: the others wait
for it in the collectives of the model, and torch or Ray ends the run.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank could not go on; the message is that rank's."""


def gather(value: T) -> list[T]:
    """``value`` of every rank, in rank order; a collective of the host."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Agreement:
    """A block that every rank runs, behind which ``told`` has what each has told, in rank order.

    Raises:
        Exception: what the block raised here.
        RankError: it succeeded here and failed on another rank.
    """

    def __init__(self) -> None:
        self.told: list[Any] = []
        self._mine: Any = None

    def tell(self, value: Any) -> None:
        """Tell the other ranks something that can be pickled, at the end of the block."""
        self._mine = value

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # and not a process that is told to stop
            gather((f"{type(error).__name__}: {error}", None))
        if error is not None:
            return
        outcomes = gather((None, self._mine))
        if failed := [f"rank {rank}: {message}" for rank, (message, _) in enumerate(outcomes) if message is not None]:
            raise RankError("; ".join(failed))
        self.told = [value for _, value in outcomes]
