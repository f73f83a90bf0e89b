"""Verify mode: compute some samples of a live micro-batch alone and compare.

``verify=auto`` verifies the first mini-batches of a model that the tests do not cover (``tested.py``).

Rounding changes a log-prob by an amount that depends on dtype, depth and weights, so the tolerance is measured. A
second forward of the sample moves every element of each attention output by a rounding step, up or down at random.
Four times the change is the tolerance. The mean error over a response is bounded too, to detect small errors in every
token, such as positions that are off by one.

Near a tie of two experts, rounding moves a token by much or not at all. So errors above the tolerance are compared
again: each token may differ by the largest change in several forwards with four times the noise.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.config import PrefixGrouperOptions
from verl_pg_plugin.engine.plan import PlannedMicroBatch
from verl_pg_plugin.engine.ranks import gather, gather_or_raise
from verl_pg_plugin.issue import SHARING_OFF
from verl_pg_plugin.layout import IntArray, Sequences

logger = logging.getLogger(__name__)

NUM_SAMPLES = 2
"""Samples of a micro-batch that are verified."""
NOISE_FACTOR = 4
OUTLIER_FACTOR = 16
"""Noise over the median, above which it is no rounding: normal noise exceeds it in one token of 10^26."""
NUM_FLIP_SEEDS = 8
"""Pairs of forwards with opposite noise: at a tie of experts one of the two flips the token."""

# bf16 and fp16 products are summed in float32 and rounded once; float32 sums round at each term.
_ROUNDING_STEP = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 16.0}
_LEAST_TOLERANCE = {torch.bfloat16: 4.0, torch.float16: 4.0, torch.float32: 1024.0}

Responses: TypeAlias = Mapping[str, list[torch.Tensor]]
"""Output name, as ``log_probs`` -> (R,) float64 of each sample, on the host."""
Errors: TypeAlias = dict[str, list[torch.Tensor]]
Noise: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Tolerance(NamedTuple):
    """Bounds on the relative error of a token, and on the mean of a long response."""

    per_token: float
    mean: float

    @classmethod
    def from_noise(cls, noise: list[torch.Tensor], dtype: torch.dtype) -> "Tolerance":
        """Derive the tolerance from the changes by rounding ``noise``, (R,) of each sample.

        Tokens with infinite noise, or noise far above the median as from a flipped expert, do not count: they would
        hide real errors. The tolerance is at least a few eps of ``dtype``: noise of few tokens may be small by chance.
        """
        least = _LEAST_TOLERANCE[dtype] * torch.finfo(dtype).eps
        pooled = torch.cat(noise)
        pooled = pooled[pooled.isfinite()] if pooled.isfinite().any() else pooled.new_zeros(1)
        pooled = pooled[pooled <= max(OUTLIER_FACTOR * pooled.median().item(), least)]
        return cls(
            per_token=max(NOISE_FACTOR * pooled.max().item(), least),
            mean=max(NOISE_FACTOR * pooled.mean().item(), least / 16),
        )


def compare(
    got: Responses, expected: Responses, tolerances: Mapping[str, Tolerance], moved: list[Errors] | None = None
) -> tuple[float, tuple[int, str] | None]:
    """Return the largest error, and the index and message of the sample furthest above its tolerance, if any.

    The largest change in ``moved``, forwards with large noise, is added to the tolerance of each token and the mean.
    """
    max_error, factor, worst = 0.0, 1.0, None
    for name, of_samples in relative_errors(got, expected).items():
        tolerance = tolerances[name]
        for sample, error_R in ((at, of_one) for at, of_one in enumerate(of_samples) if len(of_one)):
            num_tokens, mean = len(error_R), error_R.mean().item()
            # One token of the response may have the largest error.
            mean_tolerance = min(tolerance.mean + tolerance.per_token / num_tokens, tolerance.per_token)
            tolerance_R = torch.full_like(error_R, tolerance.per_token)
            if moved:
                changes_KR = torch.stack([changes[name][sample] for changes in moved]).nan_to_num(posinf=0.0)
                tolerance_R += changes_KR.amax(0)
                mean_tolerance += changes_KR.mean(1).max().item()
            token = int((error_R / tolerance_R).argmax())
            max_error = max(max_error, error_R.max().item())
            times = max((error_R / tolerance_R)[token].item(), mean / mean_tolerance)
            if times > factor:
                factor = times
                text = (
                    f"{name} of response token {token} of {num_tokens} is {got[name][sample][token]:.6g}, and alone "
                    f"{expected[name][sample][token]:.6g} (error {error_R[token]:.3g}, tolerance "
                    f"{tolerance_R[token]:.3g}; mean over the response {mean:.3g}, tolerance {mean_tolerance:.3g})"
                )
                worst = sample, text
    return max_error, worst


def relative_errors(got: Responses, expected: Responses) -> Errors:
    """Return the (R,) errors of each sample, relative to the larger of 1 and the expected magnitude.

    The error is infinite if one of the two is NaN, and 0 for equal infinities or two NaN.
    """

    def error(got_R: torch.Tensor, expected_R: torch.Tensor) -> torch.Tensor:
        same = (got_R == expected_R) | (got_R.isnan() & expected_R.isnan())
        error_R = (got_R - expected_R).abs() / expected_R.abs().clamp(min=1.0)
        return error_R.nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(same, 0.0)

    return {name: list(map(error, got[name], samples)) for name, samples in expected.items()}


def read_responses(
    outputs: Mapping[str, torch.Tensor], samples: list[int], prompt_lengths: IntArray
) -> dict[str, list[torch.Tensor]]:
    """Select the values of some samples' response tokens, as verl reads them, from jagged (B, length) outputs."""
    responses: dict[str, list[torch.Tensor]] = {}
    for name, jagged in outputs.items():
        # Rounding may change the choice of experts, and the overlap of two top k.
        if not jagged.is_floating_point() or name.startswith("overlap_"):
            continue
        bounds, values = jagged.offsets().tolist(), jagged.values().detach()
        spans = [slice(bounds[i] + int(prompt_lengths[i]) - 1, bounds[i + 1] - 1) for i in samples]
        responses[name] = [values[span].double().cpu() for span in spans]
    return responses


def rounding_noise(steps: int = 1, seed: int = 0) -> Noise:
    """Return noise for one forward, which moves every element of each layer's (T, ...) output by rounding steps.

    Signs are random, differ between layers, and are the same in each process. Negative ``steps`` invert them.
    """
    layers = count(seed << 16)  # a CPU's generator reads 32 bits

    def move(out: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(out.device).manual_seed(next(layers))
        signs = torch.randint(0, 2, out.shape, generator=generator, device=out.device) * 2 - 1
        step = steps * _ROUNDING_STEP[out.dtype] * torch.finfo(out.dtype).eps
        return (out.double() * (1 + step * signs)).to(out.dtype)

    return move


class MismatchError(RuntimeError):
    """Outputs of a sample with shared prefixes differ from those of the sample alone."""


class Verifier:
    """Selects the samples to verify, the same micro-batches on all ranks, and compares them.

    ``model`` describes the model in messages. ``untested`` is why the tests do not cover it; empty if they do.
    """

    def __init__(self, options: PrefixGrouperOptions, model: str, dtype: torch.dtype, untested: str = "") -> None:
        self.options, self.model, self.dtype = options, model, dtype
        self._is_auto = options.verify == "auto"
        self._untested = max(gather(untested)) if self._is_auto else ""  # all ranks verify, or none
        self.enabled = bool(self._untested) if self._is_auto else options.verify != "off"
        if self._untested and dist.get_rank() == 0:
            logger.warning(
                "verify=auto: %s, so two sequences of each micro-batch are verified in the first mini-batch of each "
                "kind; ++prefix_grouper.verify=off skips that",
                self._untested,
            )
        self._seen: Counter[str] = Counter()
        self._verified: dict[str, bool] = {}  # verified kinds -> True if a verified micro-batch read ancestors
        self._before: dict[str, bool] = {}  # the same before this mini-batch
        self._turn, self._seconds = 0, 0.0

    def choose(self, planned: PlannedMicroBatch, sequences: Sequences, kind: str) -> list[int]:
        """Return the indices in ``sequences`` of the samples to verify; empty if the micro-batch is not verified.

        Call it once for each micro-batch on every rank, as it counts them. All ranks get ``NUM_SAMPLES`` indices, or
        none. In the first verified micro-batch they are the sample with most attention to a shared prefix, and the one
        halfway down that order; each later one starts one place further. A single sample is returned twice.

        Args:
            kind: "update" or "forward-only"; they are counted separately.
        """
        self._seen[kind] += 1
        if not self._is_due(planned, kind):
            return []
        order = sequences.order()
        across = order.num_shared * (order.num_tokens - order.num_shared)
        by_sharing = order.sequences[np.argsort(-across, kind="stable")]
        chosen = by_sharing[(np.arange(NUM_SAMPLES) * len(by_sharing) // NUM_SAMPLES + self._turn) % len(by_sharing)]
        self._turn += 1
        return chosen.tolist()

    def _is_due(self, planned: PlannedMicroBatch, kind: str) -> bool:
        if period := self.options.verify_period:
            return (self._seen[kind] - 1) % period == 0
        # auto verifies all micro-batches of a mini-batch: a class may mix neighbours that share nothing.
        verified = self._before if self._is_auto else self._verified
        if not self.enabled or verified.get(kind):
            return False
        # The first micro-batch with shared tokens, and the first in which attention crosses segments.
        return planned.reads_ancestors or ((planned.shares_tokens or self._is_auto) and kind not in verified)

    def check(
        self,
        got: Responses,
        compute_alone: Callable[[Callable[[], Noise] | None], Responses],
        planned: PlannedMicroBatch,
        samples: list[int],
        micro_batch: TensorDict,
        kind: str,
    ) -> float:
        """Return the largest error of some samples against the same samples alone; a collective.

        ``compute_alone`` runs each sample in a separate forward, with noise if it is given. If an error exceeds its
        tolerance, its rank raises MismatchError and the others RankError.
        """
        alone, fixed = compute_alone(None), self.options.verify_tolerance
        if fixed is not None:
            tolerances = dict.fromkeys(alone, Tolerance(per_token=fixed, mean=fixed))
        else:
            noise = relative_errors(compute_alone(rounding_noise), alone)
            tolerances = {name: Tolerance.from_noise(errors, self.dtype) for name, errors in noise.items()}
        max_error, worst = compare(got, alone, tolerances)
        if any(gather(worst is not None)):
            if fixed is None:
                steps = ((sign * NOISE_FACTOR, 1 + seed) for seed in range(NUM_FLIP_SEEDS) for sign in (1, -1))
                moved = [relative_errors(compute_alone(partial(rounding_noise, *pair)), alone) for pair in steps]
                max_error, worst = compare(got, alone, tolerances, moved)
            with gather_or_raise() as ranks:
                if worst is not None:
                    raise MismatchError(self._message(samples[worst[0]], worst[1], micro_batch, kind))
                ranks.append(None)
        self._verified[kind] = self._verified.get(kind, False) or planned.reads_ancestors
        return max_error

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds of the block as time of verification."""
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def end_mini_batch(self, kind: str, num_samples: int, max_error: float) -> None:
        """Log how many samples of a mini-batch were verified, and their largest error."""
        if num_samples:
            # The first of a kind as a warning: verl's workers hide lower levels, its trainer metrics of log-probs.
            level = logging.INFO if kind in self._before else logging.WARNING
            text = "%s mini-batch verified in %.1f s: %d samples alone differ by at most %.3g"
            logger.log(level, text, kind, self._seconds, num_samples, max_error)
        self._before, self._seconds = dict(self._verified), 0.0

    def _message(self, sample: int, difference: str, micro_batch: TensorDict, kind: str) -> str:
        uids = tu.get(micro_batch, "uid")
        uid = "" if uids is None else f" (uid {uids[sample]})"
        cause = (
            f"++prefix_grouper.verify={self.options.verify}: sample {sample}{uid} of the {len(micro_batch)} in {kind} "
            f"micro-batch {self._seen[kind] - 1} is wrong with shared prefixes: {difference}; "
            f"{self.model}, {self.dtype}. "
        )
        if self._untested:
            return (
                f"{cause}{self._untested}; a model that mixes tokens outside of attention cannot share prefixes. Fix: "
                f"{SHARING_OFF}, or ++prefix_grouper.verify=off to train with these numbers"
            )
        return (
            f"{cause}Fix: {SHARING_OFF}, and report this message. Another ++prefix_grouper.attention_kernel shows if "
            "the kernel is wrong. If stock verl differs as much with other micro-batches, set "
            "++prefix_grouper.verify_tolerance"
        )
