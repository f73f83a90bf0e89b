"""The prefix tree of a batch: sequences in sorted order with the number of tokens that neighbours share.

The forward at position t reads tokens 0..t and predicts token t+1. So two sequences share position t if their tokens
0..t+1 are equal: they fork one token before they differ, and every computed token has one label. A sequence of L tokens
computes L-1, because its last token predicts nothing.

In sorted order, a sequence shares with any earlier one no more than with its predecessor.
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
    num_tokens: IntArray  # computed tokens: the sequence's length minus one
    num_shared: IntArray  # leading tokens shared with the sequence before it; 0 for the first

    @property
    def num_new(self) -> IntArray:
        """Tokens (B,) that a sequence does not share with any sequence before it."""
        return self.num_tokens - self.num_shared

    def subset(self, places: IntArray) -> "PrefixOrder":
        """Return the order of the sequences at ascending ``places`` (n,)."""
        num_shared = np.zeros_like(places)
        if len(places) > 1:  # two sequences share what all neighbours between them share
            num_shared[1:] = np.minimum.reduceat(self.num_shared[: places[-1] + 1], places[:-1] + 1)
        return PrefixOrder(self.sequences[places], self.num_tokens[places], num_shared)


def build_prefix_order(
    tokens: IntArray, offsets: IntArray, classes: IntArray | None = None, offset_in_image: IntArray | None = None
) -> PrefixOrder:
    """Sort sequences by their tokens and count the tokens that neighbours share.

    Arguments as for ``build_packed_layout``. ``offset_in_image`` (N,) counts earlier tokens of the same image, 0 for
    text. No sequence forks at a positive offset, so an image is computed whole, and none may end there. ValueError if a
    token id is out of range.
    """
    lengths = np.diff(offsets)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= 2**32):
        raise ValueError(f"token ids must be in [0, 2**32), got {tokens.min()} .. {tokens.max()}")

    # Big-endian bytes compare like the integers they encode, so each comparison is one memcmp.
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
    if offset_in_image is not None:
        num_shared -= offset_in_image[offsets[sequences] + num_shared]
    return PrefixOrder(sequences=sequences, num_tokens=lengths[sequences].astype(np.int64) - 1, num_shared=num_shared)


def counted(offsets: IntArray) -> IntArray:
    """Return positions (N,) 0, 1, 2, ... of each sequence."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
