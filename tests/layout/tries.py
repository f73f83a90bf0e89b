"""Random batches of token sequences that share prefixes, and an oracle that describes their rows without any index.

A row is named by its *key*: the tokens it has read and the one it predicts. Two rows are one exactly when their keys
(and classes) are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from verl_pg_plugin.layout import PackedLayout, PrefixOrder, Sequences

Key = tuple[int, ...]

# Two busy cores miss a deadline without anything being wrong.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@dataclass(frozen=True)
class Batch:
    """B sequences of prompt + response; those of different class must not share rows."""

    sequences: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]
    classes: tuple[int, ...] | None = None

    @property
    def tokens(self) -> np.ndarray:
        return np.array([token for sequence in self.sequences for token in sequence], dtype=np.int64)

    @property
    def offsets(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.sequences)])

    @property
    def as_numbers(self) -> Sequences:
        classes = None if self.classes is None else np.array(self.classes)
        return Sequences(self.tokens, self.offsets, np.array(self.prompt_lengths), classes)

    def layout(self) -> PackedLayout:
        return self.as_numbers.lay_out()

    def order(self) -> PrefixOrder:
        return self.as_numbers.order()

    def take(self, rows: Sequence[int]) -> "Batch":
        return Batch(
            tuple(self.sequences[row] for row in rows),
            tuple(self.prompt_lengths[row] for row in rows),
            None if self.classes is None else tuple(self.classes[row] for row in rows),
        )

    def class_of(self, sequence: int) -> int:
        return 0 if self.classes is None else self.classes[sequence]

    def rows(self) -> set[tuple[int, Key]]:
        """(class, key) of every row the batch needs."""
        sequences = enumerate(self.sequences)
        return {(self.class_of(s), tokens[: t + 2]) for s, tokens in sequences for t in range(len(tokens) - 1)}


def response_places(batch: Batch) -> dict[int, tuple[int, Key]]:
    """By logical index, sequence and key of every token that predicts a response token."""
    return {
        int(batch.offsets[s]) + t: (s, tokens[: t + 2])
        for s, tokens in enumerate(batch.sequences)
        for t in range(batch.prompt_lengths[s] - 1, len(tokens) - 1)
    }


def batch_of(*pairs: tuple[Sequence[int], Sequence[int]], classes: Sequence[int] | None = None) -> Batch:
    """A batch of (prompt, response) pairs."""
    return Batch(
        tuple((*prompt, *response) for prompt, response in pairs),
        tuple(len(prompt) for prompt, _ in pairs),
        None if classes is None else tuple(classes),
    )


@st.composite
def batches(draw: st.DrawFn, max_sequences: int = 8, max_tail: int = 6, with_classes: bool = False) -> Batch:
    """Tries: a sequence starts afresh or branches off an earlier one; few token ids make it share deeply.

    Identical sequences, strict prefixes of others, single-token prompts and single-token responses all occur.
    """
    token = st.integers(0, draw(st.integers(0, 3)))
    sequences: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, max_sequences))):
        parent = draw(st.sampled_from([(), *sequences]))
        stem = parent[: draw(st.integers(0, len(parent)))]
        tail = draw(st.lists(token, min_size=max(0, 2 - len(stem)), max_size=max_tail))
        sequences.append((*stem, *tail))
    prompt_lengths = tuple(draw(st.integers(1, len(sequence) - 1)) for sequence in sequences)
    classes = None
    if with_classes:
        classes = tuple(draw(st.lists(st.integers(0, 2), min_size=len(sequences), max_size=len(sequences))))
    return Batch(tuple(sequences), prompt_lengths, classes)


def sequence_rows(layout: PackedLayout, tokens: Sequence[int]) -> list[int]:
    """Rows of one sequence, found by walking the trie token by token; for layouts without classes."""
    previous = np.arange(layout.num_tokens) - 1
    first_rows, parents = layout.cu_seqlens_q[:-1], layout.segment_parent
    previous[first_rows] = np.where(parents >= 0, layout.cu_seqlens_q[parents + 1] - 1, -1)
    steps = zip(previous.tolist(), layout.input_ids.tolist(), layout.labels.tolist(), strict=True)
    row_of = {step: row for row, step in enumerate(steps)}
    rows = [-1]
    for token, label in pairwise(tokens):
        rows.append(row_of[rows[-1], token, label])
    return rows[1:]
