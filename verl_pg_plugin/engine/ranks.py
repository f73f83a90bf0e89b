"""Steps that succeed on every rank or fail on every rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank could not go on; the message is that rank's."""


def over_ranks(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """``value`` of every rank of the group, in rank order; this one's as it is where there is no other, or no group."""
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_every_rank(step: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run ``step`` here and on the other ranks of the group; if one fails, none goes on to wait for it.

    Raises:
        Exception: what ``step`` raised here.
        RankError: ``step`` succeeded here and failed elsewhere.
    """
    result: list[T] = []
    gather_on_every_rank(lambda: result.append(step()), group)  # the result itself need not travel
    return result[0]


def gather_on_every_rank(step: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """``on_every_rank``, and what ``step`` returned on each rank, in rank order.

    Raises:
        Exception: what ``step`` raised here.
        RankError: ``step`` succeeded here and failed elsewhere.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = step()
    except Exception as error:  # raised again below, once every rank knows
        failure = error
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = over_ranks((message, result), group)
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {message}" for rank, (message, _) in enumerate(outcomes) if message is not None]
    if failed:
        raise RankError("; ".join(failed))
    return [result for _, result in outcomes]
