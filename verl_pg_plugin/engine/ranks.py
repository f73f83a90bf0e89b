"""Gather values from all ranks, and raise an error of one rank on all of them.

Ranks do this before a mini-batch's first forward, and where verify mode compares. Any other error is raised on its rank
alone: the others block in the model's collectives until torch or Ray ends the run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank failed; the message is that rank's."""


def gather(value: T) -> list[T]:
    """Return ``value`` of every rank, in rank order; a collective of the host."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def gather_or_raise() -> Iterator[list[Any]]:
    """Gather the one value that the block appends on each rank; after the block the list holds all ranks' values.

    An exception of the block on one rank is a RankError on the others.
    """
    values: list[Any] = []
    try:
        yield values
        assert len(values) == 1, "the block appends one value"
    except Exception as error:  # no BaseException: a process that is being stopped must not wait for other ranks
        gather((f"{type(error).__name__}: {error}", None))
        raise
    outcomes = gather((None, values))
    if failed := [f"rank {rank}: {message}" for rank, (message, _) in enumerate(outcomes) if message is not None]:
        raise RankError("; ".join(failed))
    values[:] = [value for _, (value,) in outcomes]
