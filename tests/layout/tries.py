"""Random batches of sequences that share prefixes, their plans, and an oracle that uses no index of a layout.

A row is named by its *key*: the tokens it has read and the one it predicts. Equal keys (and classes) are one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from verl_pg_plugin.layout import PackedLayout, PrefixOrder, Sequences, build_prefix_order
from verl_pg_plugin.planning import micro_batches
from verl_pg_plugin.planning.activation_policy import CacheWeights
from verl_pg_plugin.planning.micro_batches import MicroBatch, MicroBatchLimits, cut_micro_batches

Key = tuple[int, ...]

# Examples miss the deadline on a loaded machine.
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
        return self.as_numbers.build_layout()

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


def batch_of(*pairs: tuple[Sequence[int], Sequence[int]]) -> Batch:
    return Batch(tuple((*prompt, *response) for prompt, response in pairs), tuple(len(prompt) for prompt, _ in pairs))


@st.composite
def batches(draw: st.DrawFn, max_sequences: int = 8, with_classes: bool = False) -> Batch:
    """Draw tries: a sequence is new or branches off an earlier one; few token ids make it share deeply.

    Identical sequences, strict prefixes of others, prompts of one token and empty responses, both of one sequence too,
    all occur. The first sequence has a response.
    """
    token = st.integers(0, draw(st.integers(0, 3)))
    sequences: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, max_sequences))):
        parent = draw(st.sampled_from([(), *sequences]))
        stem = parent[: draw(st.integers(0, len(parent)))]
        least = 1 if sequences else 2
        sequences.append((*stem, *draw(st.lists(token, min_size=max(0, least - len(stem)), max_size=6))))
    prompt_lengths = tuple(draw(st.integers(1, len(tokens) - (not at))) for at, tokens in enumerate(sequences))
    classes = None
    if with_classes:
        classes = tuple(draw(st.lists(st.integers(0, 2), min_size=len(sequences), max_size=len(sequences))))
    return Batch(tuple(sequences), prompt_lengths, classes)


def sequence_rows(layout: PackedLayout, tokens: Sequence[int]) -> list[int]:
    """Return the rows of one sequence of a layout without classes, by walking the trie token by token."""
    first_rows, parents = layout.cu_seqlens_q[:-1], layout.segment_parent
    previous = np.arange(layout.num_tokens) - 1
    previous[first_rows] = np.where(parents >= 0, layout.cu_seqlens_q[parents + 1] - 1, -1)
    steps = zip(previous.tolist(), layout.input_ids.tolist(), layout.labels.tolist(), strict=True)
    row_of = {step: row for row, step in enumerate(steps)}
    rows = [-1]
    for token, label in pairwise(tokens):
        rows.append(row_of[rows[-1], token, label])
    return rows[1:]


@st.composite
def tries(draw: st.DrawFn) -> Batch:
    """Draw groups with a tree of one to four levels each, and prompts that end at any depth."""
    pairs: list[tuple[Sequence[int], Sequence[int]]] = []
    for root in range(draw(st.integers(1, 3))):
        stems: list[tuple[int, ...]] = [(root, *range(50, 50 + draw(st.integers(1, 8))))]
        for level in range(draw(st.integers(1, 4))):
            stems = [
                (*stem, *(100 * level + child for _ in range(draw(st.integers(0, 4)))))
                for stem in stems
                for child in range(draw(st.integers(1, 3)))
            ][: 14 // (root + 1)]
        for stem in stems:
            whole = (*stem, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)))
            prompt = draw(st.integers(1, len(whole) - (not pairs)))
            pairs.append((whole[:prompt], whole[prompt:]))
    return batch_of(*draw(st.permutations(pairs)))


def limits_for(batch: Batch) -> st.SearchStrategy[MicroBatchLimits]:
    """Limits that every sequence meets."""
    longest = max(map(len, batch.sequences)) - 1
    return st.builds(MicroBatchLimits, st.integers(longest, 2 * longest) | st.none(), st.none() | st.integers(1, 4))


_weight = st.sampled_from([0.0, 0.5, 1.5])
cache_weights = st.builds(
    CacheWeights, _weight, _weight, st.sampled_from([0.0, 0.5, 1.0]), computed=st.sampled_from([0.5, 1.0, 2.0])
)


@st.composite
def plans(draw: st.DrawFn, batch: Batch, **fixed: Any) -> list[list[MicroBatch]]:
    """Draw a cut of a batch under any limits, weights and costs."""
    options = {
        "limits": draw(limits_for(batch)),
        "weights": draw(cache_weights),
        "at_least": draw(st.just(1) | st.integers(1, len(batch.sequences))),
        "forward_only": draw(st.booleans()),
        "cost": draw(st.sampled_from([0.0, 2.0])),
    } | fixed
    return cut_at_cost(batch.order(), **options)


def cut_at_cost(*args: Any, cost: float = 4.0, **options: Any) -> list[list[MicroBatch]]:
    """``cut_micro_batches`` with a cost per micro-batch below the few tokens of a test."""
    with patch.object(micro_batches, "MICRO_BATCH_COST", cost):
        return cut_micro_batches(*args, **options)


@dataclass(frozen=True)
class LaidOut:
    """A micro-batch, its layout and the keys of the tokens that its ``kv_index`` can refer to."""

    part: MicroBatch
    batch: Batch
    layout: PackedLayout
    keys: list[tuple[int, Key]]

    @property
    def own_keys(self) -> list[tuple[int, Key]]:
        return self.keys[self.layout.num_cached :]


def lay_out(batch: Batch, group: list[MicroBatch], forward_only: bool) -> list[LaidOut]:
    """Return layouts of all chunks of a split group in forward order, or of one micro-batch that computes tokens."""
    if not any(part.num_tokens for part in group):
        return []
    layouts = micro_batches.build_layouts(group, batch.as_numbers, forward_only)
    mine = [batch.take(part.sequences) for part in group]
    keys = [part_keys(own, num_of_group(part)) for part, own in zip(group, mine, strict=True)]
    return [LaidOut(*laid_out) for laid_out in zip(group, mine, layouts, keys, strict=True)]


def num_of_group(part: MicroBatch) -> int:
    """Sequences of the split group; 0 in an ordinary micro-batch."""
    return part.chunk.num_sequences if part.chunk else 0


def part_keys(batch: Batch, num_of_group: int) -> list[tuple[int, Key]]:
    """Return class and key of cached and own tokens, sequence by sequence, without an index of the layout."""
    classes = np.array([batch.class_of(s) for s in range(len(batch.sequences))])
    apart = np.where(np.arange(len(classes)) < num_of_group, -1, classes)
    keys: dict[tuple[int, Key], tuple[int, Key]] = {}
    for s in build_prefix_order(batch.tokens, batch.offsets, apart).sequences.tolist():
        tokens = batch.sequences[s]
        for t in range(len(tokens) - 1):
            keys.setdefault((int(apart[s]), tokens[: t + 2]), (batch.class_of(s), tokens[: t + 2]))
    return list(keys.values())
