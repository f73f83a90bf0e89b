"""Cut a mini-batch into micro-batches that keep groups whole, by the rows they really compute."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from verl_pg_plugin.layout import PrefixOrder


@dataclass(frozen=True)
class MicroBatchLimits:
    """What one micro-batch may hold; None for no limit.

    Attributes:
        max_rows: physical tokens (``*_max_token_len_per_gpu`` with ``use_dynamic_bsz``).
        max_sequences: sequences (``*_micro_batch_size_per_gpu`` without).
    """

    max_rows: int | None = None
    max_sequences: int | None = None

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
    """Neighbours ``first <= k < stop`` in sorted order, computed together in ``rows`` rows."""

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
    run_of = _run_maker(order)
    group_starts = np.flatnonzero(order.num_shared == 0).tolist()
    groups = [run_of(a, b) for a, b in zip(group_starts, [*group_starts[1:], num_sequences], strict=True)]
    runs = [run for group in groups for run in _split(group, order, limits, run_of)]

    wanted = max(at_least, limits.least_micro_batches(sum(run.rows for run in runs), num_sequences))
    while len(runs) < min(wanted, num_sequences):
        largest = max((run for run in runs if run.sequences > 1), key=lambda run: run.rows)
        runs.remove(largest)
        runs.extend(_halve(largest, order, run_of))

    bins: list[list[_Run]] = [[] for _ in range(min(wanted, num_sequences))]
    loads = [[0, 0] for _ in bins]
    for run in sorted(runs, key=lambda run: (-run.rows, run.first)):
        open_bins = [i for i, (r, n) in enumerate(loads) if limits.admit(r + run.rows, n + run.sequences)]
        if not open_bins:
            bins.append([])
            loads.append([0, 0])
            open_bins = [len(bins) - 1]
        chosen = min(open_bins, key=lambda i: loads[i][0])
        bins[chosen].append(run)
        loads[chosen] = [loads[chosen][0] + run.rows, loads[chosen][1] + run.sequences]

    by_rows = sorted(range(len(bins)), key=lambda i: -loads[i][0])
    return [[int(order.sequences[k]) for run in bins[i] for k in range(run.first, run.stop)] for i in by_rows]


def _run_maker(order: PrefixOrder) -> Callable[[int, int], _Run]:
    new_rows = np.concatenate([[0], np.cumsum(order.num_new)])

    def run_of(first: int, stop: int) -> _Run:
        rows = order.num_shared[first] + new_rows[stop] - new_rows[first]
        return _Run(first=first, stop=stop, rows=int(rows))

    return run_of


def _split(run: _Run, order: PrefixOrder, limits: MicroBatchLimits, run_of: Callable[[int, int], _Run]) -> list[_Run]:
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
            shared = order.num_shared[piece.first + 1 : piece.stop]
            forks = (np.flatnonzero(shared == shared.min()) + piece.first + 1).tolist()
            branches = [run_of(a, b) for a, b in pairwise([piece.first, *forks, piece.stop])]
            pending.extend(reversed(branches))
            continue
        merged = run_of(pieces[-1].first, piece.stop) if pieces else piece
        if pieces and limits.admit(merged.rows, merged.sequences):
            pieces[-1] = merged
        else:
            pieces.append(piece)
    return pieces


def _halve(run: _Run, order: PrefixOrder, run_of: Callable[[int, int], _Run]) -> tuple[_Run, _Run]:
    """Cut in two where neighbours share least; of equal places, nearest to the middle."""
    shared = order.num_shared[run.first + 1 : run.stop]
    places = np.flatnonzero(shared == shared.min()) + run.first + 1
    cut = int(places[np.abs(2 * places - run.first - run.stop).argmin()])
    return run_of(run.first, cut), run_of(cut, run.stop)
