"""Batches with images, by what is hard about them."""

from tests.modalities.tiny_vision import Shot, Shown, shots

SYSTEM, QUESTION = [10, 11, 12], [20, 21, 22, 23]
CAT, DOG = Shown((1, 8, 12), 1), Shown((1, 8, 12), 2)
"""Two images of one size: their tokens are equal."""
WIDE, CHART = Shown((1, 4, 8), 3), Shown((1, 4, 8), 5)
OTHER_CHART = Shown((1, 4, 8), 6)

TWO_GROUPS = [
    *shots([SYSTEM, CAT, QUESTION], [40, 41, 42, 43], [40, 44], [45, 46, 47, 48, 49]),
    *shots([SYSTEM, DOG, QUESTION], [40, 41, 42], [40, 44, 50], [51]),
]
TEXT_ALONE = shots([SYSTEM, QUESTION], [40, 41, 42], [55, 56])
MIXED = [*TWO_GROUPS, *shots([SYSTEM, WIDE, [30, 31], CAT, QUESTION], [40, 41], [52, 53, 54]), *TEXT_ALONE]
TURNS = [
    Shot([SYSTEM, CAT, QUESTION], [[40, 41], CHART, [42, 43]]),
    Shot([SYSTEM, CAT, QUESTION], [[40, 41], CHART, [44]]),
    Shot([SYSTEM, CAT, QUESTION], [[40, 41], OTHER_CHART, [42, 43]]),
    Shot([SYSTEM, CAT, QUESTION], [[45]]),
]


def film(kind: str) -> list[Shot]:
    """A image and a video of two frames, as the processor of a model writes it."""
    clip = Shown((2, 4, 4), 7, "video" if kind in ("qwen2_vl", "qwen2_5_vl") else "frames")
    same_start = Shown((1, 4, 4), 7, clip.kind)
    return [
        *shots([SYSTEM, WIDE, clip, QUESTION], [40, 41], [42, 43, 44], [40, 45]),
        *shots([SYSTEM, WIDE, same_start, QUESTION], [40, 41]),
    ]


OPEN = Shown((1, 4, 8), 3, closed=False)
FORKS = [*shots([SYSTEM, CAT, QUESTION, OPEN], *([i, 41 + i, 30] for i in range(30, 38))), *TEXT_ALONE]
"""The first token behind an image differs, so the row of its last placeholder does."""

CHAIN = [
    *shots([SYSTEM, CAT, QUESTION, WIDE, [24]], *([40 + i, 50 - i, 41 + i, 60 + i, 30] for i in range(8))),
    *TEXT_ALONE,
]
