"""Where ranks meet in a mini-batch: in front of every forward and backward of their model, and wherever they compare.

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
_SETTLED = "settled_between_ranks"


class Meetings:
    """Those of one mini-batch. Every rank of the group must have as many forwards and backwards.

    Collectives that a loss runs on its own are not covered: where it fails on one rank, the others wait in those.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
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
        """An exception in the block is told to the others where they still come to meet this rank.

        One that has left such a block of another engine, run inside of this one's loss, is known to all or to nobody.
        """
        try:
            yield
        except Exception as error:
            settled = getattr(error, _SETTLED, False) or not self._expected
            setattr(error, _SETTLED, True)
            if settled:
                raise
            self.gather(partial(_fail, error))


def _fail(error: Exception) -> NoReturn:
    raise error
