"""Batched sampling from a transformers causal language model with a KV cache.

Legend: U unique prompts, B requests, P longest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from verl_pg_plugin.cpu.pictures import PromptPictures, model_inputs, placeholders, reads_pictures, rope_positions
from verl_pg_plugin.cpu.sampling import BatchSampler, SamplingParams


@dataclass(frozen=True)
class Request:
    """One response to draw: prompt token ids (at least one), how to sample, and the pictures of the prompt."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    pictures: PromptPictures | None = None

    @property
    def prompt(self) -> tuple[tuple[int, ...], bytes]:
        """What tells prompts apart."""
        return self.prompt_ids, b"" if self.pictures is None else self.pictures.digest


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
    never = torch.tensor(placeholders(model.config), dtype=torch.int64)
    while True:
        logits_BV = logits_BV.index_fill(1, never, -torch.inf)
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
    first_of = {request.prompt: request for request in reversed(requests)}
    unique = {prompt: row for row, prompt in enumerate(dict.fromkeys(request.prompt for request in requests))}
    prompts = [first_of[prompt] for prompt in unique]
    P = max(len(prompt.prompt_ids) for prompt in prompts)
    # Any valid id fills the padding: the mask hides it.
    input_ids_UP = torch.tensor([[0] * (P - len(p.prompt_ids)) + list(p.prompt_ids) for p in prompts])
    length_U = torch.tensor([len(prompt.prompt_ids) for prompt in prompts])
    attention_mask_UP = (torch.arange(P) >= (P - length_U).unsqueeze(1)).long()
    position_ids, next_U = (attention_mask_UP.cumsum(-1) - 1).clamp_min(0), length_U
    if reads_pictures(model.config):
        spread = [rope_positions(model, prompt.prompt_ids, prompt.pictures) for prompt in prompts]
        position_ids = torch.stack([F.pad(x_3L, (P - x_3L.shape[1], 0)) for x_3L in spread], dim=1)  # (3, U, P)
        next_U = position_ids.amax(dim=(0, 2)) + 1
    output = model(
        input_ids=input_ids_UP,
        attention_mask=attention_mask_UP,
        position_ids=position_ids,
        past_key_values=DynamicCache(config=model.config),
        use_cache=True,
        logits_to_keep=1,
        **model_inputs([prompt.pictures for prompt in prompts], model.dtype),
    )
    unique_B = torch.tensor([unique[request.prompt] for request in requests])
    output.past_key_values.reorder_cache(unique_B)
    decoding = _Decoding(
        request=torch.arange(len(requests)),
        cache=output.past_key_values,
        attention_mask=attention_mask_UP[unique_B],
        position=next_U[unique_B],
        sampler=sampler,
    )
    return decoding, output.logits[unique_B, -1]


def _decode(model: PreTrainedModel, decoding: _Decoding, token_B: torch.Tensor) -> tuple[_Decoding, torch.Tensor]:
    """Append one token to every row and return the logits of the next."""
    attention_mask_BK = F.pad(decoding.attention_mask, (0, 1), value=1)
    position_B1 = decoding.position.unsqueeze(1)
    output = model(
        input_ids=token_B.unsqueeze(1),
        attention_mask=attention_mask_BK,
        position_ids=position_B1.expand(3, -1, -1) if reads_pictures(model.config) else position_B1,
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
