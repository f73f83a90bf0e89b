"""Cut a mini-batch into micro-batches that keep groups whole, by the rows they really compute."""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from verl_pg_plugin.batching.copied_keys import CopiedKeys
from verl_pg_plugin.batching.forks import Forks
from verl_pg_plugin.batching.keys_below_trunks import copies_alone
from verl_pg_plugin.batching.least_loaded import LeastLoaded
from verl_pg_plugin.layout import PrefixOrder


@dataclass(frozen=True)
class MicroBatchLimits:
    """What one micro-batch may hold; None for no limit.

    Attributes:
        max_rows: physical tokens (``*_max_token_len_per_gpu`` with ``use_dynamic_bsz``).
        max_sequences: sequences (``*_micro_batch_size_per_gpu`` without).
        copies: what keys and values that attention copies take of ``max_rows``.
    """

    max_rows: int | None = None
    max_sequences: int | None = None
    copies: CopiedKeys = field(default_factory=CopiedKeys)

    def admit(self, rows: int, sequences: int) -> bool:
        return (self.max_rows is None or rows <= self.max_rows) and (
            self.max_sequences is None or sequences <= self.max_sequences
        )

    def least_micro_batches(self, rows: int, sequences: int) -> int:
        """Lower bound on the number of micro-batches."""
        by_rows = 1 if self.max_rows is None else -(-rows // self.max_rows)
        by_sequences = 1 if self.max_sequences is None else -(-sequences // self.max_sequences)
        return max(by_rows, by_sequences)


@dataclass(frozen=True)
class _Run:
    """Neighbours ``first <= k < stop`` in sorted order, computed together; ``rows`` of the budget, copies included."""

    first: int
    stop: int
    rows: int

    @property
    def sequences(self) -> int:
        return self.stop - self.first


def cut_micro_batches(order: PrefixOrder, limits: MicroBatchLimits, at_least: int = 1) -> list[list[int]]:
    """Partition the sequences of a mini-batch.

    A group (sequences that share their first row) stays whole unless it exceeds the limits; then it is cut where
    its members share least. Runs go, largest first, to the micro-batch that has the fewest rows and room left.

    Args:
        order: the B sequences and what they share.
        limits: what a micro-batch may hold.
        at_least: number of micro-batches to make if more than the limits ask for (ranks must agree on one).

    Returns:
        Sequence indices of each micro-batch, the micro-batch with most rows first; none is empty.

    Raises:
        ValueError: a single sequence exceeds the limits, or ``at_least`` exceeds the number of sequences.
    """
    num_sequences = len(order.sequences)
    if at_least > num_sequences:
        raise ValueError(f"{num_sequences} sequences cannot fill {at_least} micro-batches")
    run_of, forks = _run_maker(order, limits), Forks(order.num_shared)
    group_starts = np.flatnonzero(order.num_shared == 0).tolist()
    groups = [run_of(a, b) for a, b in zip(group_starts, [*group_starts[1:], num_sequences], strict=True)]
    runs = [run for group in groups for run in _split(group, order, forks, limits, run_of)]

    wanted = max(at_least, limits.least_micro_batches(sum(run.rows for run in runs), num_sequences))
    wanted = min(wanted, num_sequences)
    runs = _halve_largest(runs, wanted, forks, run_of)
    bins = _fill(runs, wanted, limits)
    bins.sort(key=lambda runs: -sum(run.rows for run in runs))
    sequences = order.sequences.tolist()
    return [[s for run in runs for s in sequences[run.first : run.stop]] for runs in bins]


def _run_maker(order: PrefixOrder, limits: MicroBatchLimits) -> Callable[[int, int], _Run]:
    num_shared, rows_before = order.num_shared.tolist(), [0, *np.cumsum(order.num_new).tolist()]
    copies = copies_alone(order, limits.copies if limits.max_rows is not None else CopiedKeys())

    def run_of(first: int, stop: int) -> _Run:
        rows = num_shared[first] + rows_before[stop] - rows_before[first]
        return _Run(first, stop, rows + math.ceil(copies(first, stop, rows)))

    return run_of


def _split(
    run: _Run, order: PrefixOrder, forks: Forks, limits: MicroBatchLimits, run_of: Callable[[int, int], _Run]
) -> list[_Run]:
    """Cut a run that exceeds the limits; neighbouring pieces stay together as long as they fit."""
    pieces: list[_Run] = []
    pending = [run]
    while pending:
        piece = pending.pop()
        if not limits.admit(piece.rows, piece.sequences):
            if piece.sequences == 1:
                raise ValueError(
                    f"sequence {int(order.sequences[piece.first])} alone needs {piece.rows} tokens of computation, "
                    f"more than the {limits.max_rows} a micro-batch may hold; raise ppo_max_token_len_per_gpu and "
                    "log_prob_max_token_len_per_gpu"
                )
            bounds = [piece.first, *forks.of(piece.first, piece.stop), piece.stop]
            branches = [run_of(a, b) for a, b in pairwise(bounds)]
            pending.extend(reversed(branches))
            continue
        merged = run_of(pieces[-1].first, piece.stop) if pieces else piece
        if pieces and limits.admit(merged.rows, merged.sequences):
            pieces[-1] = merged
        else:
            pieces.append(piece)
    return pieces


def _halve_largest(runs: list[_Run], wanted: int, forks: Forks, run_of: Callable[[int, int], _Run]) -> list[_Run]:
    """Cut the run with most rows in two until there are ``wanted``: where neighbours share least, near the middle."""
    single = [run for run in runs if run.sequences == 1]
    # Of equal runs the oldest goes first, so every rank cuts alike.
    heap = [(-run.rows, age, run) for age, run in enumerate(runs) if run.sequences > 1]
    heapq.heapify(heap)
    for age in range(len(runs), 2 * wanted - len(runs), 2):
        _, _, largest = heapq.heappop(heap)
        cut = forks.middle(largest.first, largest.stop)
        for i, half in enumerate((run_of(largest.first, cut), run_of(cut, largest.stop))):
            if half.sequences > 1:
                heapq.heappush(heap, (-half.rows, age + i, half))
            else:
                single.append(half)
    return single + [run for _, _, run in heap]


def _fill(runs: list[_Run], num_bins: int, limits: MicroBatchLimits) -> list[list[_Run]]:
    """Runs to micro-batches, largest first, each to the one with fewest rows that admits it, or to a new one."""
    bins: list[list[_Run]] = []
    rows: list[int] = []
    room: list[int] = []
    full = limits.max_sequences or 0
    by_rows = LeastLoaded()

    def open_bin() -> int:
        bins.append([])
        rows.append(0)
        room.append(full)
        return len(bins) - 1

    for _ in range(num_bins):
        by_rows.put(open_bin(), full, 0)
    for run in sorted(runs, key=lambda run: (-run.rows, run.first)):
        sequences = run.sequences if limits.max_sequences else 0
        chosen = by_rows.take(sequences)
        if chosen is not None and not limits.admit(rows[chosen] + run.rows, 1):
            by_rows.put(chosen, room[chosen], rows[chosen])  # it has the fewest rows, so no other admits the run
            chosen = None
        if chosen is None:
            chosen = open_bin()
        bins[chosen].append(run)
        rows[chosen] += run.rows
        room[chosen] -= sequences
        by_rows.put(chosen, room[chosen], rows[chosen])
    return bins
