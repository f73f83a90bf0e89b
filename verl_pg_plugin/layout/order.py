"""Which tokens sequences share, so that one forward computes them once.

The forward at position t of a sequence reads tokens 0..t and predicts token t+1, so two sequences share the position
exactly when their tokens 0..t+1 are equal. They fork one token before they differ, every computed token has one label,
and a sequence of L tokens computes L-1 (nothing is predicted from its last).

In sorted order, what a sequence shares with any earlier one it shares with its predecessor: two arrays are the tree.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class PrefixOrder:
    """B sequences sorted by their tokens; all arrays are (B,) int64 in sorted order."""

    sequences: IntArray  # index in the caller's batch
    num_tokens: IntArray  # what the sequence computes alone (its length minus one)
    num_shared: IntArray  # leading tokens it shares with the sequence before it; 0 for the first

    @property
    def num_new(self) -> IntArray:
        """Tokens (B,) that a sequence adds to those of all sequences before it."""
        return self.num_tokens - self.num_shared

    def subset(self, places: IntArray) -> "PrefixOrder":
        """What some of the sequences share, those at ascending places (n,) of the order."""
        num_shared = np.zeros_like(places)
        if len(places) > 1:  # two sequences share what all neighbours between them share
            num_shared[1:] = np.minimum.reduceat(self.num_shared[: places[-1] + 1], places[:-1] + 1)
        return PrefixOrder(self.sequences[places], self.num_tokens[places], num_shared)


def build_prefix_order(
    tokens: IntArray, offsets: IntArray, classes: IntArray | None = None, inside: IntArray | None = None
) -> PrefixOrder:
    """Sort sequences by their tokens and count what neighbours share; ValueError where a token id is out of range.

    Args:
        tokens, offsets, classes: see ``build_packed_layout``.
        inside: (N,) optional; tokens in front of this one that belong to the same image, 0 for a first one and for
            text. An image is computed whole or not at all: no sequence forks where this is positive, or may end there.
    """
    lengths = np.diff(offsets)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= 2**32):
        raise ValueError(f"token ids must lie in [0, 2**32), got {tokens.min()} .. {tokens.max()}")

    # Big-endian bytes compare like the integers they hold, so the sort is one memcmp per comparison.
    keys = tokens.astype(">u4").tobytes()
    spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    class_of = [0] * len(spans) if classes is None else classes.tolist()
    order = sorted(range(len(spans)), key=lambda s: (class_of[s], keys[4 * spans[s][0] : 4 * spans[s][1]]))

    num_shared = np.zeros(len(order), dtype=np.int64)
    for k, (before, this) in enumerate(pairwise(order), start=1):
        if class_of[before] == class_of[this]:
            a, b = tokens[slice(*spans[before])], tokens[slice(*spans[this])]
            n = min(len(a), len(b))
            num_shared[k] = max(int(np.append(a[:n] != b[:n], True).argmax()) - 1, 0)
    sequences = np.asarray(order, dtype=np.int64)
    if inside is not None:
        num_shared -= inside[offsets[sequences] + num_shared]
    return PrefixOrder(sequences=sequences, num_tokens=lengths[sequences].astype(np.int64) - 1, num_shared=num_shared)


def counted(offsets: IntArray) -> IntArray:
    """Positions (N,) that count 0, 1, 2, ... in every sequence."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
