"""What ranks tell each other; an error on one of them is raised on all.

Ranks agree in front of a mini-batch's first forward, and on what verify mode finds. What else fails later fails on its
rank alone: the others wait for it in the collectives of the model, and torch or Ray ends the run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def gather_or_raise() -> Iterator[list[Any]]:
    """A block that every rank runs and in which each appends one value; behind it the list has those of all ranks.

    What the block raises on one rank is a RankError on the others.
    """
    told: list[Any] = []
    try:
        yield told
        assert len(told) == 1, "a rank tells one value"
    except Exception as error:  # a process that is told to stop tells nothing
        gather((f"{type(error).__name__}: {error}", None))
        raise
    outcomes = gather((None, told))
    if failed := [f"rank {rank}: {message}" for rank, (message, _) in enumerate(outcomes) if message is not None]:
        raise RankError("; ".join(failed))
    told[:] = [value for _, (value,) in outcomes]
