"""Batches whose groups exceed a micro-batch."""

from dataclasses import replace

import numpy as np
from benchmarks.batches import Sample

from tests.support import group

SYSTEM, TURN = list(range(5)), list(range(40, 52))


def trie() -> list[Sample]:
    """Three levels with labels on inner nodes: a first turn, branches, branches of branches."""
    rng, samples = np.random.default_rng(3), []
    for _ in range(3):
        turn = rng.integers(97, size=9).tolist()
        for _ in range(3):
            second = rng.integers(97, size=6).tolist()
            for _ in range(3):
                tail = rng.integers(97, size=int(rng.integers(2, 7))).tolist()
                samples.append(Sample([*SYSTEM, *range(60, 66)], [*TURN, *turn, *second, *tail]))
    # A prompt that continues into the others' responses: its last tokens are labels there.
    samples.append(Sample([*SYSTEM, *range(60, 66), *TURN[:6]], [3, 1, 4]))
    return [samples[i] for i in np.random.default_rng(0).permutation(len(samples))]


ONE_GROUP = group(20, [6, 9, 5, 8, 7, 6, 9, 4], 1)
DUPLICATES = [Sample(range(20), r) for r in (*[[7, 8, 9, 10]] * 3, [30, 31], [40, 41, 3], [50, 51])]
NESTED = [
    Sample(range(30), response)
    for response in ([1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2], [7, 8], [7, 8], [7, 8], [7], [9, 1, 2, 3])
]
MIXED = [*group(6, [7, 1], 3), *ONE_GROUP, *group(9, [4, 4], 2), *trie(), *group(5, [3], 9)]
TURNS = [
    Sample(whole[: 6 * k + 3], whole[6 * k + 3 : 6 * k + 6])
    for whole in (list(range(54)), [*range(30), *range(60, 84)])
    for k in range(9)
]
TOOL_TOKENS = [replace(s, mask=[i % 3 > 0 for i in range(len(s.response))]) for s in trie()]

TEMPLATE = [  # two tokens, which groups and a short prompt share
    Sample([1, 2, *s.prompt], s.response)
    for s in (*group(40, [30, 25, 28, 21], 1), *group(35, [33, 27, 30, 24], 2), *group(3, [5, 4], 3))
]

CASES: dict[str, tuple[list[Sample], int]] = {
    "one_group_of_8": (ONE_GROUP, 36),
    "a_trie_of_three_levels": (trie(), 56),
    "small_groups_next_to_large_ones": (MIXED, 56),
    "a_prompt_that_nearly_fills_the_budget": (group(33, [3, 4, 2, 4], 7), 38),
    "equal_and_nested_responses": (NESTED, 36),
    "turns_of_two_sessions_that_part": (TURNS, 56),
    "tool_tokens": (TOOL_TOKENS, 60),
    "groups_with_a_chat_template": (TEMPLATE, 130),
}
"""Samples, and the token budget of a micro-batch."""
