"""Verify mode: some samples of a live micro-batch are computed alone and must give the same numbers."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.attention.kernels.selection import VarlenKernel
from verl_pg_plugin.config.options import PrefixGrouperOptions
from verl_pg_plugin.engine.batch.layout_field import layout_of, set_layout
from verl_pg_plugin.engine.batch.micro_batch_plan import unshared
from verl_pg_plugin.engine.batch.row_selection import RowSelector
from verl_pg_plugin.engine.batch.sequences import Sequences
from verl_pg_plugin.engine.sharing_modes import SharingMode
from verl_pg_plugin.engine.steps.meetings import Meetings
from verl_pg_plugin.engine.steps.token_comparison import (
    Comparison,
    Responses,
    Tolerance,
    compare,
    read_responses,
    relative_errors,
    rounded_otherwise,
)
from verl_pg_plugin.layout import Layout

logger = logging.getLogger(__name__)
FIRST_WITHIN = 100
"""Micro-batches of each kind among which ``verify=first`` looks for one to verify; ranks ask each other in each."""

ForwardStep: TypeAlias = Callable[[TensorDict, Callable | None, bool], tuple[torch.Tensor, dict[str, Any]]]
"""verl's ``forward_step``: micro-batch, loss function, forward only -> loss, outputs."""


class MismatchError(RuntimeError):
    """A sample computed with shared prefixes is not what it is alone."""


@dataclass
class Verifier:
    """Stands between an engine and its ``forward_step``. Every rank must call it equally often.

    Attributes:
        options: when to verify, how much, and what a mismatch does.
        mode: of the engine.
        num_layers, dtype: of the model, for the message and the tolerance.
        attending_with: makes ``forward_step`` use another attention kernel within a block.
        fallen_back: there was a mismatch with ``on_mismatch=rmpad``, and nothing is shared any more.
        seen: micro-batches so far, by kind.
        verified: kinds that were verified, and whether rows of another segment were read in any of those micro-batches.
        turn: verifications so far.
        comparisons: those of all ranks since the metrics were last taken.
    """

    options: PrefixGrouperOptions
    mode: SharingMode
    num_layers: int
    dtype: torch.dtype
    attending_with: Callable[[VarlenKernel], AbstractContextManager[None]]
    fallen_back: bool = field(default=False, init=False)
    seen: Counter[str] = field(default_factory=Counter, init=False)
    verified: dict[str, bool] = field(default_factory=dict, init=False)
    turn: int = field(default=0, init=False)
    comparisons: list[Comparison] = field(default_factory=list, init=False)

    def forward_step(
        self,
        step: ForwardStep,
        meetings: Meetings,
        micro_batch: TensorDict,
        loss_function: Callable | None,
        forward_only: bool,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``step``, checked where it is this micro-batch's turn; ranks go on or stop together.

        Raises:
            MismatchError: on every rank if one has a mismatch, unless ``on_mismatch=rmpad``.
        """
        kind = "forward-only" if forward_only else "update"
        if self.fallen_back:
            self._unshare(micro_batch)
        elif self._is_due(kind, meetings, micro_batch):
            run = partial(step, micro_batch, loss_function, forward_only)
            return self._verified(step, run, meetings, micro_batch, kind)
        return step(micro_batch, loss_function, forward_only)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A mini-batch; if it fails, it has not been counted, since ranks may have come to different places in it."""
        before = Counter(self.seen), dict(self.verified), self.turn, list(self.comparisons)
        try:
            yield
        except BaseException:
            self.seen, self.verified, self.turn, self.comparisons = before
            raise

    def take_metrics(self) -> dict[str, list[float]]:
        """What was verified on all ranks since the last call."""
        comparisons, self.comparisons = self.comparisons, []
        metrics = {
            "prefix_grouper/verified_rows": [float(sum(comparison.num_samples for comparison in comparisons))],
            "prefix_grouper/verify_fallback": [float(self.fallen_back)],
        }
        if comparisons:
            metrics["prefix_grouper/verify_max_error"] = [max(comparison.max_error for comparison in comparisons)]
        return metrics

    def _is_due(self, kind: str, meetings: Meetings, micro_batch: TensorDict) -> bool:
        index = self.seen[kind]
        self.seen[kind] += 1
        if self.options.verify == "every_n":
            return index % self.options.verify_every == 0
        if self.verified.get(kind) or index >= FIRST_WITHIN:
            return False
        # The first that shares anything on any rank: the others would prove nothing. Where no sequence attended to rows
        # of another in it (turns that only continue one another, the owner of a chain's prompt), the first in which one
        # does has its turn too.
        shares, reads = self._shares_and_reads(meetings, micro_batch)
        return reads or (shares and kind not in self.verified)

    def _shares_and_reads(self, meetings: Meetings, micro_batch: TensorDict) -> tuple[bool, bool]:
        """Whether rows are shared, and whether some are read beside those of one's own segment, on any rank."""

        def here() -> tuple[bool, bool]:
            layout = self._layout(micro_batch)
            return layout.shares_tokens, layout.reads_ancestors

        ranks = meetings.gather(here)
        return any(shares for shares, _ in ranks), any(reads for _, reads in ranks)

    def _verified(
        self,
        step: ForwardStep,
        run: Callable[[], tuple[torch.Tensor, dict[str, Any]]],
        meetings: Meetings,
        micro_batch: TensorDict,
        kind: str,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """``run``, which is ``step`` of the whole micro-batch, checked by ``step`` of samples alone."""
        _, reads = self._shares_and_reads(meetings, micro_batch)
        sequences = self.mode.read(micro_batch)
        rows = self._choose(sequences, micro_batch)
        layout = self.mode.lay_out(unshared(sequences.select(rows)))
        # Before the forward and not after it: FSDP2 expects a forward's backward to come next.
        expected, tolerances = self._alone(step, micro_batch, sequences.prompt_lengths[rows], rows, layout)
        loss, output = run()

        model_output = output["model_output"]

        def compared() -> tuple[Comparison, str | None, bool]:
            got = read_responses(model_output, rows, sequences.prompt_lengths)
            comparison = compare(got, expected, tolerances)
            mismatch = self._describe(comparison, rows, micro_batch, kind)
            return comparison, mismatch, not self._layout(micro_batch).is_chunk

        ranks = meetings.gather(compared)
        # The first of a kind as a warning: verl's workers hide all below, and its trainer the metrics of log-probs.
        level = logging.INFO if kind in self.verified else logging.WARNING
        self.turn += 1
        self.verified[kind] = self.verified.get(kind, False) or reads
        # Ranks that share sequences (Ulysses) have compared the same ones; they are neighbours.
        compared_by = list(enumerate(ranks))[:: self.mode.sp_size]
        self.comparisons.extend(comparison for _, (comparison, _, _) in compared_by)
        mismatches = [f"rank {rank}: {text}" for rank, (_, text, _) in compared_by if text is not None]
        if not mismatches:
            text = "%s micro-batch verified: samples alone (here %s) differ by at most %.3g"
            logger.log(level, text, kind, rows, max(comparison.max_error for comparison, _, _ in ranks))
            return loss, output
        if self.options.on_mismatch == "raise":
            raise MismatchError("; ".join(mismatches) + f". {self._remedy()}")
        logger.warning("%s. From here on nothing is shared (prefix_grouper.on_mismatch=rmpad)", "; ".join(mismatches))
        self.fallen_back = True
        if not all(stands_alone for _, _, stands_alone in ranks):
            # Other parts of a chain have read its rows, and owe it gradients; all ranks run one more forward, or none.
            return loss, output
        self._unshare(micro_batch)
        del loss, output  # the graph of the forward that is thrown away
        return run()

    def _alone(
        self, step: ForwardStep, micro_batch: TensorDict, prompt_lengths: np.ndarray, rows: list[int], layout: Layout
    ) -> tuple[Responses, dict[str, Tolerance]]:
        """The samples without sharing, and how exactly that can be told, by output."""

        def forward() -> Responses:
            samples = RowSelector(micro_batch).select(rows)
            set_layout(samples, layout)
            with torch.no_grad():
                _, output = step(samples, None, True)
            return read_responses(output["model_output"], list(range(len(rows))), prompt_lengths)

        expected, given = forward(), self.options.verify_tolerance
        if given is not None:
            return expected, dict.fromkeys(expected, Tolerance(per_token=given, mean=given))
        with self.attending_with(rounded_otherwise(self.mode.kernel)):
            noise = relative_errors(forward(), expected)
        return expected, {name: Tolerance.from_noise(errors, self.dtype) for name, errors in noise.items()}

    def _choose(self, sequences: Sequences, micro_batch: TensorDict) -> list[int]:
        """Samples to verify: the one with most attention across a prefix, and others spread over the rest, in turn."""
        order = sequences.order()
        shared = np.maximum(order.num_shared, np.append(order.num_shared[1:], 0))
        by_sharing = order.sequences[np.argsort(-shared * (order.num_tokens - shared), kind="stable")]
        num_samples = min(self.options.verify_rows, len(by_sharing))
        chosen = by_sharing[(np.arange(num_samples) * len(by_sharing) // num_samples + self.turn) % len(by_sharing)]
        if not self.mode.static_rows:
            return chosen.tolist()
        # Rows are padded to the token budget and must fit: no more than those of the micro-batch, which do.
        rows_alone = np.cumsum(np.diff(sequences.offsets)[chosen] - 1)
        return chosen[rows_alone <= max(self._layout(micro_batch).num_tokens, rows_alone[0])].tolist()

    def _layout(self, micro_batch: TensorDict) -> Layout:
        layout = layout_of(micro_batch)
        return self.mode.lay_out(self.mode.read(micro_batch)) if layout is None else layout

    def _unshare(self, micro_batch: TensorDict) -> None:
        """Make ``micro_batch`` run as plain rmpad; a chain that has begun goes on to its end."""
        layout = self._layout(micro_batch)
        if layout.shares_tokens and not layout.is_chunk:
            set_layout(micro_batch, self.mode.lay_out(unshared(self.mode.read(micro_batch))))

    def _describe(self, comparison: Comparison, rows: list[int], micro_batch: TensorDict, kind: str) -> str | None:
        worst = comparison.worst
        if worst is None:
            return None
        row = rows[worst.sample]
        uids = tu.get(micro_batch, "uid")
        uid = "" if uids is None else f" (uid {uids[row]})"
        return (
            f"sample {row}{uid} of the {len(micro_batch)} in {kind} micro-batch {self.seen[kind] - 1}: with "
            f"shared prefixes {worst}; {self.num_layers} layers, all through packed attention, {self.dtype}, attention "
            f"kernel {self.mode.kernel.name}"
        )

    def _remedy(self) -> str:
        return (
            "Set actor_rollout_ref.actor.use_prefix_grouper=False, or ++prefix_grouper.on_mismatch=rmpad to go on "
            "without sharing, and report the message; another kernel (prefix_grouper.attention_kernel) tells whether "
            "it is to blame. If stock verl with other micro-batches differs from itself as much, set "
            "prefix_grouper.verify_tolerance"
        )
