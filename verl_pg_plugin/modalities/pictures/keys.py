"""Integers that are equal where tokens, pictures and positions are.

Token ids do not tell two pictures apart, since both are rows of one placeholder. So the rows of a picture get the key
of its content, and equal keys mean equal pixels, bit for bit: verl runs its processor anew for every response, so
neither uid nor object identity tells. Positions enter as steps from token to token. Where keys are equal from the
start on, positions are.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from verl_pg_plugin.layout.order import IntArray
from verl_pg_plugin.modalities.batch_error import BatchError
from verl_pg_plugin.modalities.pictures.occurrences import Picture

FIRST_KEY = 1 << 31
"""Keys from here on stand for more than a token."""


def build_keys(
    tokens: IntArray, offsets: IntArray, positions: IntArray, pictures: list[Picture], rows: list[dict[str, Any]]
) -> tuple[IntArray, IntArray]:
    """Keys, and what is indivisible.

    Args:
        tokens: (N,) ids.
        offsets: (B+1,) bounds of the sequences.
        positions: (P, N).
        pictures: all that the batch has, in order.
        rows: B dicts of verl's ``multi_modal_inputs``.

    Returns:
        keys and inside, (N,) each; see ``Content``.

    Raises:
        BatchError: a token id is out of range.
    """
    if tokens.size and (tokens.min() < 0 or tokens.max() >= FIRST_KEY):
        raise BatchError(f"token ids must lie in [0, 2**31), got {tokens.min()} .. {tokens.max()}")
    keys, inside = tokens.astype(np.int64), np.zeros(len(tokens), dtype=np.int64)
    before = np.roll(positions, 1, axis=1)
    before[:, offsets[:-1]] = -1
    steps = positions - before
    unusual = (steps != 1).any(axis=0)
    key_of: dict[Hashable, int] = {}
    contents = _Contents()
    for picture in pictures:
        span = slice(picture.first, picture.first + picture.num_tokens)
        pixels = rows[picture.sequence][picture.kind.pixels][picture.patches]
        shown = (contents.number(picture, pixels), steps[:, span].tobytes())
        keys[span] = FIRST_KEY + key_of.setdefault(shown, len(key_of))
        inside[span] = np.arange(picture.num_tokens)
        unusual[span] = False
    for at in np.flatnonzero(unusual).tolist():  # the first token behind a picture, as a rule
        keys[at] = FIRST_KEY + key_of.setdefault((int(tokens[at]), steps[:, at].tobytes(), "token"), len(key_of))
    return keys, inside


class _Contents:
    """Numbers of contents: equal ones are the same kind, grid, dtype and pixels.

    The sum of all words finds those that should be equal, and then they are compared: no hash decides. Both run on all
    threads at the speed of memory; a batch of 32 pictures of 1,024 tokens holds 0.8 GB.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[torch.Tensor, int]]] = {}
        self._count = 0

    def number(self, picture: Picture, pixels: torch.Tensor) -> int:
        words = _words(pixels)
        shown = (picture.kind.name, picture.grid, pixels.dtype, pixels.shape, int(words.sum()))
        alike = self._known.setdefault(shown, [])
        for known, number in alike:
            if torch.equal(known, words):
                return number
        alike.append((words, self._count))
        self._count += 1
        return self._count - 1


def _words(pixels: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers: wide ones where they divide its size."""
    raw = pixels.contiguous().cpu().reshape(-1).view(torch.uint8)
    if raw.numel() % 8:
        return raw
    return (raw.clone() if raw.storage_offset() % 8 else raw).view(torch.int64)
