"""Random trees, their plans, and the chunks of split groups with the names of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.layout.tries import Batch, Key, batch_of
from verl_pg_plugin.layout import PackedLayout, build_prefix_order
from verl_pg_plugin.planning import micro_batches
from verl_pg_plugin.planning.micro_batches import (
    CacheWeights,
    MicroBatch,
    MicroBatchLimits,
    cut_micro_batches,
)


@st.composite
def tries(draw: st.DrawFn, max_sequences: int = 14) -> Batch:
    """Groups with a tree of one to four levels each, and prompts that end at any depth."""
    pairs: list[tuple[Sequence[int], Sequence[int]]] = []
    for root in range(draw(st.integers(1, 3))):
        stems: list[tuple[int, ...]] = [(root, *range(50, 50 + draw(st.integers(1, 8))))]
        for level in range(draw(st.integers(1, 4))):
            stems = [
                (*stem, *(100 * level + child for _ in range(draw(st.integers(0, 4)))))
                for stem in stems
                for child in range(draw(st.integers(1, 3)))
            ][: max(max_sequences // (root + 1), 1)]
        for stem in stems:
            tail = draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
            whole = (*stem, *tail)
            prompt = draw(st.integers(1, len(whole) - 1))
            pairs.append((whole[:prompt], whole[prompt:]))
    return batch_of(*draw(st.permutations(pairs)))


@st.composite
def limits_for(draw: st.DrawFn, batch: Batch) -> MicroBatchLimits:
    """Limits that every single sequence meets."""
    longest = max(map(len, batch.sequences)) - 1
    max_tokens = draw(st.integers(longest, 2 * longest) | st.none())
    max_sequences = draw(st.none() | st.integers(1, 4))
    return MicroBatchLimits(max_tokens, max_sequences)


@st.composite
def plans(draw: st.DrawFn, batch: Batch, **fixed: Any) -> list[list[MicroBatch]]:
    """Cuts of a batch under any limits, weights and costs."""
    weight = st.sampled_from([0.0, 0.5, 1.5])
    options = {
        "limits": draw(limits_for(batch)),
        "weights": CacheWeights(draw(weight), draw(weight), draw(st.sampled_from([0.0, 0.5, 1.0]))),
        "at_least": draw(st.just(1) | st.integers(1, len(batch.sequences))),
        "forward_only": draw(st.booleans()),
        "micro_batch_cost": draw(st.sampled_from([0.0, 2.0])),
    } | fixed
    return cut_micro_batches(batch.order(), **options)


@dataclass(frozen=True)
class LaidOut:
    """A micro-batch, its layout and the keys of the tokens that its ``kv_index`` may name."""

    part: MicroBatch | None
    batch: Batch
    layout: PackedLayout
    keys: list[tuple[int, Key]]

    @property
    def own_keys(self) -> list[tuple[int, Key]]:
        return self.keys[self.layout.num_cached :]


def lay_out(batch: Batch, group: list[MicroBatch], forward_only: bool) -> list[LaidOut]:
    """Layouts of all chunks of a split group, in forward order, or of one ordinary micro-batch."""
    layouts = micro_batches.lay_out(group, batch.as_numbers, forward_only)
    mine = [batch.take(part.sequences) for part in group]
    keys = [part_keys(own, num_of_group(part)) for part, own in zip(group, mine, strict=True)]
    return [LaidOut(*laid_out) for laid_out in zip(group, mine, layouts, keys, strict=True)]


def num_of_group(part: MicroBatch) -> int:
    """Sequences of the split group; 0 in an ordinary micro-batch."""
    return part.chunk.num_sequences if part.chunk else 0


def part_keys(batch: Batch, num_of_group: int) -> list[tuple[int, Key]]:
    """Class and key of cached and of own tokens, sequence by sequence: no index of the layout is used."""
    classes = np.array([batch.class_of(s) for s in range(len(batch.sequences))])
    apart = np.where(np.arange(len(classes)) < num_of_group, -1, classes)
    keys: dict[tuple[int, Key], tuple[int, Key]] = {}
    for s in build_prefix_order(batch.tokens, batch.offsets, apart).sequences.tolist():
        tokens = batch.sequences[s]
        for t in range(len(tokens) - 1):
            keys.setdefault((int(apart[s]), tokens[: t + 2]), (batch.class_of(s), tokens[: t + 2]))
    return list(keys.values())
