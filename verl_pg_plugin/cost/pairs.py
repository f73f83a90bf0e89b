"""How many (query, key) pairs attention computes under the causal mask and, where layers have one, a window."""

import numpy as np

from verl_pg_plugin.layout import Layout
from verl_pg_plugin.layout.order import IntArray


def visible_pairs(start: IntArray, rows: IntArray, window: int | None = None) -> IntArray:
    """Pairs of each segment: the query at position p sees the keys of positions 0 .. p, the last ``window`` of them.

    Args:
        start: (S,) position of a segment's first row, which is the number of rows it shares.
        rows: (S,) rows of the segment.
        window: keys a query sees, itself included, as transformers counts ``sliding_window``; None for all.

    Returns:
        (S,) pairs, in closed form.
    """
    stop = start + rows
    if window is None:
        return _triangle(stop) - _triangle(start)
    inside_stop, inside_start = np.minimum(stop, window), np.minimum(start, window)
    beyond = (stop - inside_stop) - (start - inside_start)
    return _triangle(inside_stop) - _triangle(inside_start) + window * beyond


def num_pairs(layout: Layout, window: int | None = None) -> int:
    """Pairs of a whole layout; padding is not computed."""
    return int(visible_pairs(*layout.segments, window).sum())


def _triangle(n: IntArray) -> IntArray:
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2
