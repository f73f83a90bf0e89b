"""Batched sampling from a transformers causal language model with a KV cache.

Legend: U unique prompts, B requests, P longest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from verl_pg_plugin.cpu.sampling import BatchSampler, SamplingParams


@dataclass(frozen=True)
class Request:
    """One response to draw: prompt token ids (at least one) and how to sample."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Completion:
    """A response: token ids, their log-probs (nats), and ``stop``, ``length`` or ``abort``."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class _Decoding:
    """The B rows still being decoded.

    Index of the request and next position ``(B,)``, attention mask over the K cached tokens ``(B, K)``, int64.
    """

    request: torch.Tensor
    cache: DynamicCache
    attention_mask: torch.Tensor
    position: torch.Tensor
    sampler: BatchSampler

    def select(self, rows: torch.Tensor) -> _Decoding:
        self.cache.reorder_cache(rows)
        return _Decoding(
            self.request[rows],
            self.cache,
            self.attention_mask[rows],
            self.position[rows],
            self.sampler.select(rows),
        )


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    eos_token_ids: Collection[int],
    generator: torch.Generator,
    logprobs_mode: str = "processed_logprobs",
    aborted: Callable[[], bool] = lambda: False,
) -> list[Completion]:
    """Sample one response a request, all in one batch; equal prompts are read by the model once.

    Args:
        model: a causal language model on the CPU.
        requests: B requests; results keep their order.
        eos_token_ids: a response ends after any of these, unless its request ignores them.
        generator: source of randomness of the requests without a seed.
        logprobs_mode: see :class:`verl_pg_plugin.cpu.sampling.BatchSampler`.
        aborted: asked before every step; once true, unfinished responses come back as they are.
    """
    stops = [_stop_ids(request.params, eos_token_ids) for request in requests]
    token_ids: list[list[int]] = [[] for _ in requests]
    log_probs: list[list[float]] = [[] for _ in requests]
    finish_reasons = ["abort"] * len(requests)
    if aborted():
        return [Completion(*fields) for fields in zip(token_ids, log_probs, finish_reasons, strict=True)]

    sampler = BatchSampler.build([request.params for request in requests], generator, logprobs_mode)
    decoding, logits_BV = _prefill(model, requests, sampler)
    running = torch.ones(len(requests), dtype=torch.bool)
    while True:
        token_B, log_prob_B = decoding.sampler.sample(logits_BV)
        for index, token, log_prob in zip(
            decoding.request.tolist(), token_B.tolist(), log_prob_B.tolist(), strict=True
        ):
            if not running[index]:
                continue
            token_ids[index].append(token)
            log_probs[index].append(log_prob)
            if token in stops[index]:
                finish_reasons[index], running[index] = "stop", False
            elif len(token_ids[index]) == requests[index].params.max_tokens:
                finish_reasons[index], running[index] = "length", False
        running_B = running[decoding.request]
        if not running_B.any() or aborted():
            break
        # Copying the cache costs about a step, so finished rows are dropped only when half are.
        if running_B.sum() * 2 <= len(running_B):
            rows = running_B.nonzero().squeeze(1)
            decoding, token_B = decoding.select(rows), token_B[rows]
        decoding, logits_BV = _decode(model, decoding, token_B)
    return [Completion(*fields) for fields in zip(token_ids, log_probs, finish_reasons, strict=True)]


def _stop_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
    return eos | frozenset(params.stop_token_ids)


def _prefill(
    model: PreTrainedModel, requests: Sequence[Request], sampler: BatchSampler
) -> tuple[_Decoding, torch.Tensor]:
    """Run the unique prompts, left-padded to one length, and give every request its prompt's cache rows."""
    unique = {prompt_ids: row for row, prompt_ids in enumerate(dict.fromkeys(r.prompt_ids for r in requests))}
    P = max(map(len, unique))
    # Any valid id fills the padding: the mask hides it.
    input_ids_UP = torch.tensor([[0] * (P - len(prompt_ids)) + list(prompt_ids) for prompt_ids in unique])
    length_U = torch.tensor([len(prompt_ids) for prompt_ids in unique])
    attention_mask_UP = (torch.arange(P) >= (P - length_U).unsqueeze(1)).long()
    output = model(
        input_ids=input_ids_UP,
        attention_mask=attention_mask_UP,
        position_ids=(attention_mask_UP.cumsum(-1) - 1).clamp_min(0),
        past_key_values=DynamicCache(config=model.config),
        use_cache=True,
        logits_to_keep=1,
    )
    unique_B = torch.tensor([unique[request.prompt_ids] for request in requests])
    output.past_key_values.reorder_cache(unique_B)
    decoding = _Decoding(
        request=torch.arange(len(requests)),
        cache=output.past_key_values,
        attention_mask=attention_mask_UP[unique_B],
        position=length_U[unique_B],
        sampler=sampler,
    )
    return decoding, output.logits[unique_B, -1]


def _decode(model: PreTrainedModel, decoding: _Decoding, token_B: torch.Tensor) -> tuple[_Decoding, torch.Tensor]:
    """Append one token to every row and return the logits of the next."""
    attention_mask_BK = torch.nn.functional.pad(decoding.attention_mask, (0, 1), value=1)
    output = model(
        input_ids=token_B.unsqueeze(1),
        attention_mask=attention_mask_BK,
        position_ids=decoding.position.unsqueeze(1),
        past_key_values=decoding.cache,
        use_cache=True,
    )
    moved = _Decoding(
        decoding.request,
        output.past_key_values,
        attention_mask_BK,
        decoding.position + 1,
        decoding.sampler,
    )
    return moved, output.logits[:, -1]
