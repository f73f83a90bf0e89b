"""Where the images of a batch stand, and integers that are equal where tokens, images and positions are.

Placeholders mark images in the tokens; patches are in what verl's processor made of them. Token ids do not tell two
images apart, since both are tokens of one placeholder. So the tokens of an image get the key of its content, and equal
keys mean equal pixels, bit for bit: verl runs its processor anew for every response, so neither uid nor object identity
tells. Positions enter as steps from token to token. Where keys are equal from the start on, positions are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_pg_plugin.layout import IntArray
from verl_pg_plugin.modalities.text import SHARING_OFF, BatchError

WITHOUT_EFFECT = frozenset({"images_seqlens", "mm_token_type_ids", "second_per_grid_ts"})
"""What verl adds and the model needs for positions alone, which the batch has."""


@dataclass(frozen=True)
class Kind:
    """Images or videos.

    Attributes:
        name: for messages.
        pixels, grids: keys of verl's ``multi_modal_inputs``, which are keywords of the model too: (patches, numbers)
            and (images, 3), each a number of frames, rows and columns of patches.
        token_id: the placeholder.
    """

    name: str
    pixels: str
    grids: str
    token_id: int


@dataclass(frozen=True, eq=False)
class Image:
    """An image or a frame of a video, where it occurs: the vision encoder looks at each frame alone.

    Attributes:
        kind: image or video.
        first: its first placeholder, counted from the start of the sequence.
        num_tokens: placeholders, which follow each other.
        pixels: (patches, numbers), a view.
        grid: rows and columns of patches.
    """

    kind: Kind
    first: int
    num_tokens: int
    pixels: torch.Tensor
    grid: tuple[int, int]


def find_images(
    tokens: IntArray, offsets: IntArray, given: list[dict[str, Any]], kinds: tuple[Kind, ...], patches_per_token: int
) -> list[list[Image]]:
    """The images of each of B sequences, in the order of their first placeholders.

    Args:
        tokens, offsets: (N,) ids, and (B+1,) bounds of the sequences.
        given: B dicts of verl's ``multi_modal_inputs``; an empty list if the batch has none.
        kinds: of images that the model reads.
        patches_per_token: patches that the vision encoder merges into one token.

    Raises:
        BatchError: placeholders and images do not match, or the processor made something else.
    """
    names = {name for kind in kinds for name in (kind.pixels, kind.grids)} | WITHOUT_EFFECT
    places = {kind: np.flatnonzero(tokens == kind.token_id) for kind in kinds}
    found: list[list[Image]] = []
    for sequence, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        of_one = given[sequence] if given else {}
        if unknown := sorted(name for name, value in of_one.items() if value is not None and name not in names):
            raise BatchError(
                f"sequence {sequence}: the processor returns {', '.join(unknown)}, which packed mode does not hand to "
                f"this model; {SHARING_OFF}"
            )
        of_sequence: list[Image] = []
        for kind, at in places.items():
            first, last = np.searchsorted(at, [start, stop])
            of_sequence += _images_of(sequence, of_one, kind, at[first:last] - start, patches_per_token)
        found.append(sorted(of_sequence, key=lambda image: image.first))
        if of_sequence and found[-1][-1].first + found[-1][-1].num_tokens == stop - start:
            raise BatchError(
                f"sequence {sequence} ends in an image, and no token follows that its last token could predict; drop "
                "it, or raise data.max_response_length so that tool results are not cut off"
            )
    return found


def _images_of(
    sequence: int, given: Mapping[str, Any], kind: Kind, places: IntArray, patches_per_token: int
) -> Iterator[Image]:
    """Images of one kind in one sequence, whose placeholders stand at ``places``."""
    grids, pixels = given.get(kind.grids), given.get(kind.pixels)
    sizes: list[list[int]] = [] if grids is None else grids.tolist()
    frames = [(height, width) for num_frames, height, width in sizes for _ in range(num_frames)]
    needed = sum(height * width for height, width in frames)
    pixels = () if pixels is None else pixels
    if len(pixels) != needed:
        raise BatchError(f"sequence {sequence}: {kind.pixels} has {len(pixels)} patches, {kind.grids} ask for {needed}")
    patch = token = 0
    for height, width in frames:
        num_tokens = height * width // patches_per_token
        mine = places[token : token + num_tokens]
        if len(mine) < num_tokens or mine[-1] - mine[0] != num_tokens - 1:
            break
        stop = patch + height * width
        yield Image(kind, int(mine[0]), num_tokens, pixels[patch:stop], grid=(height, width))
        patch, token = stop, token + num_tokens
    if token != len(places) or patch != needed:
        raise BatchError(
            f"sequence {sequence} has {len(places)} placeholders {kind.token_id}, its {len(sizes)} {kind.name}s need "
            f"{needed // patches_per_token}, each in one piece: a response has sampled the placeholder (ban it in the "
            "rollout), or a tool result was cut off (raise data.max_response_length), or the prompt was "
            "(data.filter_overlong_prompts=True)"
        )


FIRST_KEY = 1 << 31
"""Keys from here on stand for more than a token."""


def build_keys(
    tokens: IntArray, offsets: IntArray, positions: IntArray, images: list[list[Image]]
) -> tuple[IntArray, IntArray]:
    """Keys, and what is indivisible, (N,) each; see ``Sequences``.

    Args:
        tokens, offsets: see ``find_images``.
        positions: (P, N).
        images: what that returns.
    """
    keys, inside = tokens.astype(np.int64), np.zeros(len(tokens), dtype=np.int64)
    before = np.roll(positions, 1, axis=1)
    before[:, offsets[:-1]] = -1
    steps = positions - before
    unusual = (steps != 1).any(axis=0)
    key_of: dict[Hashable, int] = {}
    known: dict[Hashable, list[torch.Tensor]] = {}
    for start, image in ((start, image) for start, of_one in zip(offsets, images, strict=False) for image in of_one):
        span = slice(start + image.first, start + image.first + image.num_tokens)
        shown = (_content(known, image), steps[:, span].tobytes())
        keys[span] = FIRST_KEY + key_of.setdefault(shown, len(key_of))
        inside[span] = np.arange(image.num_tokens)
        unusual[span] = False
    for at in np.flatnonzero(unusual).tolist():  # the first token behind an image, as a rule
        keys[at] = FIRST_KEY + key_of.setdefault((int(tokens[at]), steps[:, at].tobytes(), "token"), len(key_of))
    return keys, inside


def _content(known: dict[Hashable, list[torch.Tensor]], image: Image) -> Hashable:
    """What stands for a content: equal ones are the same kind, grid, dtype and pixels.

    The sum of all words finds those that should be equal, and then they are compared: no hash decides. Both run on all
    threads at the speed of memory; a batch of 32 images of 1,024 tokens holds 0.8 GB.
    """
    words = image.pixels.contiguous().cpu().view(torch.int64)  # every patch has a multiple of 8 bytes
    shown = (image.kind.name, image.grid, image.pixels.dtype, image.pixels.shape, int(words.sum()))
    alike = known.setdefault(shown, [])
    number = next((number for number, other in enumerate(alike) if torch.equal(other, words)), len(alike))
    if number == len(alike):
        alike.append(words)
    return shown, number
