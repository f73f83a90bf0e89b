"""Verify mode: some samples of a live micro-batch are computed alone and must give the same numbers.

Two forwards of one sample that add in another order differ by rounding, and how far that moves a log-prob depends on
dtype, depth and weights: no constant is both above the noise of a large model in bf16 and below a fault in a small one.
So the noise is measured: the sample is computed once more with every element of every attention output moved by a
rounding step, up or down at random, which is no less than what another order of adding does. Four times the change is
the tolerance. A fault moves whole tokens in one direction and stays far above it. The mean over each response is
bounded too, or a faint fault in every token would pass, such as positions that are off by one.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.config import PrefixGrouperOptions
from verl_pg_plugin.engine.plan import PlannedMicroBatch
from verl_pg_plugin.layout import IntArray, Sequences

logger = logging.getLogger(__name__)

NUM_SAMPLES = 2
"""Samples that are computed alone in a micro-batch."""
NOISE_FACTOR = 4.0

# bf16 and fp16 products are summed in float32 and rounded once, when they are stored; float32 sums round at each term.
_ROUNDING_STEP = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 16.0}
_LEAST_TOLERANCE = {torch.bfloat16: 4.0, torch.float16: 4.0, torch.float32: 1024.0}

Responses: TypeAlias = Mapping[str, list[torch.Tensor]]
"""By output (``log_probs``, ``entropy``, ``sum_pi_squared``, ``values``): (R,) float64 of each sample, on the host."""


class Tolerance(NamedTuple):
    """Bounds on the largest error of a token, and on the mean error of a long response; see ``relative_errors``."""

    per_token: float
    mean: float

    @classmethod
    def from_noise(cls, noise: list[torch.Tensor], dtype: torch.dtype) -> "Tolerance":
        """From the relative errors of each sample that come from rounding.

        Tokens whose noise is not finite tell nothing: a tolerance without bound could not fail. A few eps of ``dtype``
        always pass: noise of few tokens may be small by chance.
        """
        least = _LEAST_TOLERANCE[dtype] * torch.finfo(dtype).eps
        pooled = torch.cat(noise)
        pooled = pooled[pooled.isfinite()] if pooled.isfinite().any() else pooled.new_zeros(1)
        return cls(
            per_token=max(NOISE_FACTOR * pooled.max().item(), least),
            mean=max(NOISE_FACTOR * pooled.mean().item(), least / 16),
        )


def compare(
    got: Responses, expected: Responses, tolerances: Mapping[str, Tolerance]
) -> tuple[float, tuple[int, str] | None]:
    """The largest error, and the sample furthest beyond the tolerance of its output, if any is, with how it is off."""
    max_error, factor, worst = 0.0, 1.0, None
    for name, of_samples in relative_errors(got, expected).items():
        tolerance = tolerances[name]
        for sample, error_R in ((at, of_one) for at, of_one in enumerate(of_samples) if len(of_one)):
            token, num_tokens = int(error_R.argmax()), len(error_R)
            error, mean = error_R[token].item(), error_R.mean().item()
            # One token of the response may be off by all that a token may.
            mean_tolerance = min(tolerance.mean + tolerance.per_token / num_tokens, tolerance.per_token)
            max_error = max(max_error, error)
            if (times := max(error / tolerance.per_token, mean / mean_tolerance)) > factor:
                factor = times
                text = (
                    f"{name} of response token {token} of {num_tokens} is {got[name][sample][token]:.6g}, and alone "
                    f"{expected[name][sample][token]:.6g} (error {error:.3g}, tolerance {tolerance.per_token:.3g}; "
                    f"mean over the response {mean:.3g}, tolerance {mean_tolerance:.3g})"
                )
                worst = sample, text
    return max_error, worst


def relative_errors(got: Responses, expected: Responses) -> dict[str, list[torch.Tensor]]:
    """(R,) error of each token of each sample, relative to the larger of 1 and the expected magnitude.

    Infinite where one of the two is not a number; equal infinities, and what is not a number in both, are no error.
    """

    def error(got_R: torch.Tensor, expected_R: torch.Tensor) -> torch.Tensor:
        same = (got_R == expected_R) | (got_R.isnan() & expected_R.isnan())
        error_R = (got_R - expected_R).abs() / expected_R.abs().clamp(min=1.0)
        return error_R.nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(same, 0.0)

    return {name: list(map(error, got[name], wanted)) for name, wanted in expected.items()}


def read_responses(
    outputs: Mapping[str, torch.Tensor], samples: list[int], prompt_lengths: IntArray
) -> dict[str, list[torch.Tensor]]:
    """Of jagged (B, length) outputs, what verl reads of some samples: at the tokens in front of each response token."""
    responses: dict[str, list[torch.Tensor]] = {}
    for name, jagged in outputs.items():
        # Which experts are chosen, and how much two top k overlap, rounding may change.
        if not jagged.is_floating_point() or name.startswith("overlap_"):
            continue
        bounds, values = jagged.offsets().tolist(), jagged.values().detach()
        spans = [slice(bounds[i] + int(prompt_lengths[i]) - 1, bounds[i + 1] - 1) for i in samples]
        responses[name] = [values[span].double().cpu() for span in spans]
    return responses


def rounding_noise() -> Callable[[torch.Tensor], torch.Tensor]:
    """For one forward: moves every element of each layer's (T, ...) up or down by a rounding step.

    Each layer has signs of its own, or errors would add up or cancel; they are the same in each process.
    """
    layers = count()

    def move(out: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(out.device).manual_seed(next(layers))
        signs = torch.randint(0, 2, out.shape, generator=generator, device=out.device) * 2 - 1
        step = _ROUNDING_STEP[out.dtype] * torch.finfo(out.dtype).eps
        return (out.double() * (1 + step * signs)).to(out.dtype)

    return move


class MismatchError(RuntimeError):
    """A sample computed with shared prefixes is not what it is alone."""


class Verifier:
    """Says which micro-batches are verified, and compares; ranks decide alike, as they have planned together.

    ``model`` says in messages what runs; it computes in ``dtype``.
    """

    def __init__(self, options: PrefixGrouperOptions, model: str, dtype: torch.dtype) -> None:
        self.options, self.model, self.dtype = options, model, dtype
        self._seen: Counter[str] = Counter()
        self._verified: dict[str, bool] = {}  # kinds, and whether ancestors were read in any that was verified
        self._turn = 0

    def choose(self, planned: PlannedMicroBatch, sequences: Sequences, kind: str) -> list[int]:
        """Samples of a micro-batch to verify, asked once of each; ``kind`` is "update" or "forward-only".

        Empty where it is not its turn, else the one with most attention across a prefix and one of the rest, in turn.
        """
        self._seen[kind] += 1
        if not self._is_due(planned, kind):
            return []
        order = sequences.order()
        shared = np.maximum(order.num_shared, np.append(order.num_shared[1:], 0))
        by_sharing = order.sequences[np.argsort(-shared * (order.num_tokens - shared), kind="stable")]
        num_samples = min(NUM_SAMPLES, len(by_sharing))
        chosen = by_sharing[(np.arange(num_samples) * len(by_sharing) // num_samples + self._turn) % len(by_sharing)]
        self._turn += 1
        return chosen.tolist()

    def _is_due(self, planned: PlannedMicroBatch, kind: str) -> bool:
        if period := self.options.verify_period:
            return (self._seen[kind] - 1) % period == 0
        if period is None or self._verified.get(kind):
            return False
        # The first that shares anything on any rank. Where no sequence attended to tokens of another in it (turns that
        # only continue one another, the chunk that computes a prompt), the first in which one does has its turn too.
        return planned.reads_ancestors or (planned.shares_tokens and kind not in self._verified)

    def check(
        self,
        got: Responses,
        alone: Responses,
        perturbed: Responses,
        planned: PlannedMicroBatch,
        samples: list[int],
        micro_batch: TensorDict,
        kind: str,
    ) -> float:
        """The largest error of some samples of a micro-batch against the same alone, also with ``rounding_noise``.

        MismatchError on this rank alone where one exceeds its tolerance.
        """
        if (given := self.options.verify_tolerance) is not None:
            tolerances = dict.fromkeys(alone, Tolerance(per_token=given, mean=given))
        else:
            noise = relative_errors(perturbed, alone)
            tolerances = {name: Tolerance.from_noise(errors, self.dtype) for name, errors in noise.items()}
        max_error, worst = compare(got, alone, tolerances)
        # The first of a kind as a warning: verl's workers hide all below, and its trainer the metrics of log-probs.
        level = logging.INFO if kind in self._verified else logging.WARNING
        self._verified[kind] = self._verified.get(kind, False) or planned.reads_ancestors
        if worst is None:
            text = "%s micro-batch verified: samples alone (here %s) differ by at most %.3g"
            logger.log(level, text, kind, samples, max_error)
            return max_error
        (number, how), uids = worst, tu.get(micro_batch, "uid")
        sample = samples[number]
        uid = "" if uids is None else f" (uid {uids[sample]})"
        raise MismatchError(
            f"sample {sample}{uid} of the {len(micro_batch)} in {kind} micro-batch {self._seen[kind] - 1}: with shared "
            f"prefixes {how}; {self.model}, {self.dtype}. Set actor_rollout_ref.actor.use_prefix_grouper=False "
            "and report the message; another ++prefix_grouper.attention_kernel tells whether it is to blame. If "
            "stock verl with other micro-batches differs from itself as much, set ++prefix_grouper.verify_tolerance"
        )
