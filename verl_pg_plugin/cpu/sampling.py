"""Sampling parameters and one sampling step over a batch of next-token logits.

Legend: B requests in the batch, V vocabulary. The order of operations (temperature, top-k, top-p, softmax)
and the meaning of every field are vLLM's, which verl's agent loops speak.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")


def derived_seed(*parts: Any) -> int:
    """A seed in [0, 2**63) that changes with every part: integers, strings, or tuples of them.

    The same in every process, which ``hash`` is not.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class SamplingParams:
    """How one response is drawn. ``temperature=0`` is greedy, ``top_k<=0`` and ``top_p=1`` switch a filter off.

    A response with a ``seed`` is the same in any batch; without one it depends on what was drawn before it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: a response needs room for at least one token")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} is negative; 0 means greedy")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]; 1 keeps every token")

    @classmethod
    def from_dict(cls, sampling_params: Mapping[str, Any], *, default_max_tokens: int) -> SamplingParams:
        """Read what an agent loop sends.

        Raises:
            ValueError: a parameter this rollout does not implement, named together with its value.
        """
        params = dict(sampling_params)
        max_tokens = params.pop("max_tokens", params.pop("max_new_tokens", default_max_tokens))
        known = {name: params.pop(name) for name in cls.__dataclass_fields__ if name in params}
        params.pop("logprobs", None)  # they come back whether asked for or not
        if params.get("repetition_penalty") == 1:
            del params["repetition_penalty"]
        if params:
            raise ValueError(f"rollout 'hf' does not implement the sampling parameters {params}; remove them")
        known["stop_token_ids"] = tuple(known.get("stop_token_ids") or ())
        return cls(max_tokens=max_tokens, **known)


@dataclass(frozen=True)
class BatchSampler:
    """The sampling parameters of B requests as columns ``(B, 1)``, ready for :meth:`sample`."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    generators: tuple[torch.Generator, ...]
    logprobs_mode: str

    @classmethod
    def build(cls, params: Sequence[SamplingParams], shared: torch.Generator, logprobs_mode: str) -> BatchSampler:
        """Requests without a seed draw from ``shared``; a request with one repeats itself in any batch."""

        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).unsqueeze(1)

        return cls(
            temperature=column([p.temperature for p in params], torch.float32),
            top_k=column([p.top_k for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float32),
            generators=tuple(shared if p.seed is None else torch.Generator().manual_seed(p.seed) for p in params),
            logprobs_mode=logprobs_mode,
        )

    def select(self, rows: torch.Tensor) -> BatchSampler:
        """The same for a subset of the requests; ``rows`` int64 indices."""
        return BatchSampler(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            tuple(self.generators[row] for row in rows.tolist()),
            self.logprobs_mode,
        )

    def sample(self, logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token a row.

        Returns:
            ``token_B`` int64 and ``log_prob_B`` float32: the token's log-probability (nats) under the
            distribution it was drawn from (``processed_logprobs``) or under the model's own (``raw_logprobs``).
        """
        logits_BV = logits_BV.float()
        greedy_B1 = self.temperature == 0
        scaled_BV = logits_BV / torch.where(greedy_B1, 1.0, self.temperature)
        log_probs_BV = _filter(scaled_BV, self.top_k, self.top_p).log_softmax(-1)
        # Inverse transform: one uniform number a row, so a row's draw does not depend on its neighbours.
        cumulative_BV = log_probs_BV.double().exp().cumsum(-1)
        uniform_B1 = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in self.generators])
        drawn_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)
        token_B1 = torch.where(greedy_B1, log_probs_BV.argmax(-1, keepdim=True), drawn_B1)
        reported_BV = log_probs_BV if self.logprobs_mode == LOGPROBS_MODES[0] else logits_BV.log_softmax(-1)
        return token_B1.squeeze(1), reported_BV.gather(1, token_B1).squeeze(1)


def _filter(logits_BV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set logits outside a row's top-k, then outside its smallest set of mass ``top_p``, to ``-inf``."""
    V = logits_BV.shape[1]
    if bool(((top_k <= 0) | (top_k >= V)).all()) and bool((top_p >= 1).all()):
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(-1, descending=True)
    kept_B1 = torch.where(top_k > 0, top_k, V)
    sorted_BV = sorted_BV.masked_fill(torch.arange(V) >= kept_B1, -torch.inf)
    probs_BV = sorted_BV.softmax(-1)
    # The token that crosses top_p stays: only the mass *before* a token counts, so the first always stays.
    outside_BV = (probs_BV.cumsum(-1) - probs_BV >= top_p) & (top_p < 1)
    sorted_BV = sorted_BV.masked_fill(outside_BV, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV)
