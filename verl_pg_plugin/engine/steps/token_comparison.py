"""Compare what an engine computed for some samples, token by token, against a tolerance that fits the model.

Two forwards of one sample that add in another order differ by rounding, and how far that moves a log-prob depends on
dtype, depth and weights: no constant is both above the noise of a large model in bf16 and below a fault in a small one.
So the noise is measured. The sample is computed once more with every element of every attention output moved by a
rounding step, up or down at random, which is no less than what another order of adding does; four times the change is
the tolerance. A fault moves whole tokens in one direction and stays far above it.

The largest error alone would let a faint fault in every token pass, such as positions that are off by one, so the mean
over each response is bounded too, by four times the mean noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from verl_pg_plugin.attention.kernels.selection import VarlenKernel
from verl_pg_plugin.layout.order import IntArray

Responses: TypeAlias = Mapping[str, list[torch.Tensor]]
"""By output (``log_probs``, ``entropy``, ``sum_pi_squared``, ``values``): (R,) float64 of each sample, on the host."""

NOISE_FACTOR = 4.0

# bf16 and fp16 products are summed in float32 and rounded once, when they are stored; float32 sums round at each term.
_ROUNDING_STEP = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 16.0}
_LEAST_TOLERANCE = {torch.bfloat16: 4.0, torch.float16: 4.0, torch.float32: 1024.0}


@dataclass(frozen=True)
class Tolerance:
    """Bounds on errors relative to the larger of 1 and the expected magnitude.

    Attributes:
        per_token: on the largest error.
        mean: on the mean error of a long response.
    """

    per_token: float
    mean: float

    @classmethod
    def from_noise(cls, noise: list[torch.Tensor], dtype: torch.dtype) -> "Tolerance":
        """See the module.

        Args:
            noise: relative errors of each sample that come from rounding, see ``relative_errors``.
                Tokens whose noise is not finite tell nothing: a tolerance without bound could not fail.
            dtype: the model computes in. A few eps are always let pass: noise of few tokens may be small by chance.
        """
        pooled, least = torch.cat(noise), _LEAST_TOLERANCE[dtype] * torch.finfo(dtype).eps
        pooled = pooled[pooled.isfinite()] if pooled.isfinite().any() else pooled.new_zeros(1)
        per_token = max(NOISE_FACTOR * pooled.max().item(), least)
        return cls(per_token=per_token, mean=max(NOISE_FACTOR * pooled.mean().item(), least / 16))

    def of_mean(self, num_tokens: int) -> float:
        """Bound on the mean error of a response, one token of which may be off by ``per_token``."""
        return min(self.mean + self.per_token / num_tokens, self.per_token)


@dataclass(frozen=True)
class Excess:
    """A sample with an error beyond the tolerance.

    Attributes:
        output: name.
        sample: which of the compared samples.
        token, num_tokens: the worst response token, of how many.
        got, expected: its values.
        error, mean_error: of that token, and of the response; relative as in ``Tolerance``.
        tolerance, mean_tolerance: their bounds.
    """

    output: str
    sample: int
    token: int
    num_tokens: int
    got: float
    expected: float
    error: float
    mean_error: float
    tolerance: float
    mean_tolerance: float

    @property
    def factor(self) -> float:
        """How many times the tolerance."""
        return max(self.error / self.tolerance, self.mean_error / self.mean_tolerance)

    def __str__(self) -> str:
        return (
            f"{self.output} of response token {self.token} of {self.num_tokens} is {self.got:.6g}, and alone "
            f"{self.expected:.6g} (error {self.error:.3g}, tolerance {self.tolerance:.3g}; mean over the response "
            f"{self.mean_error:.3g}, tolerance {self.mean_tolerance:.3g})"
        )


@dataclass(frozen=True)
class Comparison:
    """Result of ``compare``.

    Attributes:
        num_samples: compared samples.
        max_error: largest error of any output of any token, relative as in ``Tolerance``.
        worst: the sample furthest beyond the tolerance; None if there is none.
    """

    num_samples: int
    max_error: float
    worst: Excess | None


def compare(got: Responses, expected: Responses, tolerances: Mapping[str, Tolerance]) -> Comparison:
    """Hold every token of every sample against the tolerance of its output."""
    found = []
    for name, errors in relative_errors(got, expected).items():
        tolerance = tolerances[name]
        for sample, error in enumerate(errors):
            token = int(error.argmax())
            found.append(
                Excess(
                    output=name,
                    sample=sample,
                    token=token,
                    num_tokens=len(error),
                    got=float(got[name][sample][token]),
                    expected=float(expected[name][sample][token]),
                    error=float(error[token]),
                    mean_error=float(error.mean()),
                    tolerance=tolerance.per_token,
                    mean_tolerance=tolerance.of_mean(len(error)),
                )
            )
    worst = max(found, key=lambda excess: excess.factor)
    return Comparison(
        num_samples=len(expected[worst.output]),
        max_error=max(excess.error for excess in found),
        worst=worst if worst.factor > 1 else None,
    )


def relative_errors(got: Responses, expected: Responses) -> dict[str, list[torch.Tensor]]:
    """(R,) error of each token of each sample; infinite where one of the two is not a number."""
    return {
        name: [_relative_error(a, b) for a, b in zip(got[name], wanted, strict=True)]
        for name, wanted in expected.items()
    }


def _relative_error(got_R: torch.Tensor, expected_R: torch.Tensor) -> torch.Tensor:
    # Equal infinities, and what is not a number in both, are nobody's error.
    same = (got_R == expected_R) | (got_R.isnan() & expected_R.isnan())
    error = (got_R - expected_R).abs() / expected_R.abs().clamp(min=1.0)
    return error.nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(same, 0.0)


def read_responses(
    outputs: Mapping[str, torch.Tensor], rows: list[int], prompt_lengths: IntArray
) -> dict[str, list[torch.Tensor]]:
    """The values that verl reads: those of the rows in front of each response token.

    Args:
        outputs: jagged (B, length) outputs of an engine.
        rows: samples to read.
        prompt_lengths: (B,).
    """
    responses: dict[str, list[torch.Tensor]] = {}
    for name, jagged in outputs.items():
        bounds, values = jagged.offsets().tolist(), jagged.values().detach()
        spans = [slice(bounds[row] + int(prompt_lengths[row]) - 1, bounds[row + 1] - 1) for row in rows]
        responses[name] = [values[span].double().cpu() for span in spans]
    return responses


def rounded_otherwise(kernel: VarlenKernel) -> VarlenKernel:
    """The kernel with every element of its output, and of what other mixers compute, moved by a rounding step."""

    def attend(q_THD: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return _moved(kernel.attend(q_THD, *args, **kwargs))  # type: ignore[arg-type]

    return replace(kernel, attend=attend, rounded=_moved)


def _moved(out: torch.Tensor) -> torch.Tensor:
    """Every element of (T, ...) moved up or down by a rounding step, the same way in each process."""
    generator = torch.Generator(out.device).manual_seed(len(out))
    signs = torch.randint(0, 2, out.shape, generator=generator, device=out.device) * 2 - 1
    step = _ROUNDING_STEP[out.dtype] * torch.finfo(out.dtype).eps
    return (out.double() * (1 + step * signs)).to(out.dtype)
