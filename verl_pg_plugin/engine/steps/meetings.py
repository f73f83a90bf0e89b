"""Where ranks meet in a mini-batch: in front of every forward and backward of their model, and to verify.

Layers of a sharded model gather weights and reduce gradients, so a rank that stops on its own leaves the others waiting
in the next layer. An error outside of the model's forward and backward is therefore told at the next meeting, and every
rank raises there. One inside them cannot be told, since the others have left for the model's collectives: that rank
raises at once and alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, TypeVar

import torch.distributed as dist

from verl_pg_plugin.engine.ranks import gather_on_every_rank

T = TypeVar("T")


class Meetings:
    """Those of one mini-batch. Every rank of the group must have as many forwards and backwards.

    Whatever runs ``on_every_rank`` of this group after the mini-batch is the last of them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        several = group is not None and dist.get_world_size(group) > 1
        self._group = group if several else None
        self._expected = True  # the others will come to the next meeting

    def before_collectives(self) -> None:
        """To be called directly in front of the model's forward, and of its backward.

        Raises:
            RankError: another rank has failed since the last meeting.
        """
        self.gather(lambda: None)
        self._expected = False

    def after_collectives(self) -> None:
        """To be called directly behind the model's forward, and its backward."""
        self._expected = True

    def gather(self, step: Callable[[], T]) -> list[T]:
        """What ``step`` returns on every rank, in rank order.

        Raises:
            Exception: what ``step`` raised here.
            RankError: another rank has failed since the last meeting, or in ``step``.
        """
        self._expected = False
        results = gather_on_every_rank(step, self._group)
        self._expected = True
        return results

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An exception in the block is told to the others where they still come to meet this rank."""
        try:
            yield
        except Exception as error:
            if not self._expected:
                raise
            self.gather(partial(_fail, error))


def _fail(error: Exception) -> NoReturn:
    raise error
