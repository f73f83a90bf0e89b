"""Where neighbours in sorted order share least, asked for many ranges of one order."""

from bisect import bisect_left

import numpy as np

from verl_pg_plugin.layout.prefix_order import IntArray


class Forks:
    """Range minima of ``num_shared``, made once in B log B and asked in log B.

    Args:
        num_shared: (B,) rows that each sequence shares with the one before it.
    """

    def __init__(self, num_shared: IntArray) -> None:
        # Level j holds the least of every 2**j neighbours; two of those cover any range.
        self._least = [num_shared]
        while 2 ** len(self._least) <= len(num_shared):
            below, half = self._least[-1], 2 ** (len(self._least) - 1)
            self._least.append(np.minimum(below[:-half], below[half:]))
        by_value = np.argsort(num_shared, kind="stable")
        values, starts = np.unique(num_shared[by_value], return_index=True)
        places = np.split(by_value, starts[1:])
        self._places = {v: p.tolist() for v, p in zip(values.tolist(), places, strict=True)}

    def of(self, first: int, stop: int) -> list[int]:
        """Places ``first < k < stop``, ascending, whose sequences share least with the one before them."""
        places, low, high = self._of(first, stop)
        return places[low:high]

    def middle(self, first: int, stop: int) -> int:
        """Of these places the one nearest to the middle, of two the first."""
        places, low, high = self._of(first, stop)
        after = bisect_left(places, (first + stop) / 2, low, high)
        return min(places[max(after - 1, low) : min(after + 1, high)], key=lambda k: abs(2 * k - first - stop))

    def _of(self, first: int, stop: int) -> tuple[list[int], int, int]:
        """All places with the value that is least between ``first`` and ``stop``, and which of them lie there."""
        level = (stop - first - 1).bit_length() - 1
        least = self._least[level]
        places = self._places[int(min(least[first + 1], least[stop - 2**level]))]
        return places, bisect_left(places, first + 1), bisect_left(places, stop)
