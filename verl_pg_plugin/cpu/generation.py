"""Sampling from a transformers causal language model on the CPU: one padded batch, decoded with a KV cache.

Shapes: U unique prompts, B requests, P longest prompt, K cached tokens, V vocabulary. Sampling parameters have vLLM's
meaning, and logits are processed in vLLM's order, as verl's agent loops expect.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper

from verl_pg_plugin.cpu.images import PromptImages, rope_positions
from verl_pg_plugin.modalities import IMAGE_MODEL_TYPES, MROPE_MODEL_TYPES, Images


def derived_seed(*parts: Any) -> int:
    """Return a seed in [0, 2**63) of all parts, equal in every process (``hash`` is not)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one response."""

    max_tokens: int
    seed: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = -1  # no filter at 0 and below
    top_p: float = 1.0  # no filter at 1
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None  # 0, which verl sends to teachers: log-probs of the prompt's tokens

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1 or self.prompt_logprobs:
            raise ValueError(
                f"{self}: set max_tokens >= 1, temperature >= 0, 0 < top_p <= 1, prompt_logprobs=0 or none; for a "
                "teacher, distillation.distillation_loss.loss_mode=k3"
            )

    @classmethod
    def from_dict(cls, sent: Mapping[str, Any]) -> "SamplingParams":
        """Read an agent loop's parameters, ``seed`` and ``max_tokens`` included; ValueError for unknown ones."""
        # Log-probs are always returned, text never.
        params = {name: value for name, value in sent.items() if name not in ("logprobs", "detokenize")}
        known = {name: params.pop(name) for name in cls.__dataclass_fields__ if name in params}
        if params and params != {"repetition_penalty": 1}:
            raise ValueError(f"rollout 'hf' does not implement the sampling parameters {params}; remove them")
        return cls(**known)


@dataclass(frozen=True)
class Request:
    """One response to draw, of a prompt with at least one token."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    images: PromptImages | None = None


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # nats, of the distribution that tokens were drawn from
    aborted: bool = True  # until the response has ended
    of_prompt: dict[str, list[list[Any]]] = field(default_factory=dict)  # from ``read_prompt``, if requested


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    eos_token_ids: Collection[int],
    aborted: Callable[[], bool] = lambda: False,
) -> list[Completion]:
    """Sample one response for each request, in one batch; equal prompts are prefilled once.

    A response depends on its prompt and seed only; other requests change its log-probs by rounding only.
    It ends after any of ``eos_token_ids``, unless its request ignores them. ``aborted`` is called before every step:
    once it returns True, unfinished responses are returned as they are.
    """
    completions = [Completion() for _ in requests]
    if aborted():
        return completions
    stops = [{*r.params.stop_token_ids, *(() if r.params.ignore_eos else eos_token_ids)} for r in requests]
    generators = [torch.Generator().manual_seed(request.params.seed) for request in requests]
    never: list[int] = []  # image placeholders, which a response cannot contain
    mrope = model.config.model_type in MROPE_MODEL_TYPES
    if model.config.model_type in IMAGE_MODEL_TYPES:
        never = [kind.token_id for kind in Images.of(model.config).kinds]
    for request, completion in zip(requests, completions, strict=True):
        if request.params.prompt_logprobs is not None:
            completion.of_prompt = read_prompt(model, request)
    logits_BLV, cache, mask_BK, position_B = _prefill(model, requests)
    logits_BV = logits_BLV[:, -1]
    params = [request.params for request in requests]
    while True:
        logits_BV[:, never] = -torch.inf
        token_B, log_prob_B = sample(logits_BV, params, generators)
        for i, completion in enumerate(completions):
            if completion.aborted:
                completion.token_ids.append(int(token_B[i]))
                completion.log_probs.append(float(log_prob_B[i]))
                ended = completion.token_ids[-1] in stops[i] or len(completion.token_ids) == params[i].max_tokens
                completion.aborted = not ended
        if not any(completion.aborted for completion in completions) or aborted():
            return completions
        mask_BK = F.pad(mask_BK, (0, 1), value=1)
        position_B1 = position_B.unsqueeze(1)
        output = model(
            input_ids=token_B.unsqueeze(1),
            attention_mask=mask_BK,
            position_ids=position_B1.expand(3, -1, -1) if mrope else position_B1,
            past_key_values=cache,
            use_cache=True,
        )
        logits_BV, position_B = output.logits[:, -1], position_B + 1


def read_prompt(model: PreTrainedModel, request: Request) -> dict[str, list[list[Any]]]:
    """Return ``prompt_ids`` and ``prompt_logprobs`` as verl's teachers do: a list of one for each prompt token.

    Entry t is of token t + 1, in nats at temperature 1. The last is zero, since no token follows.
    """
    log_probs_LV = _prefill(model, [request], logits_to_keep=0)[0][0, :-1].float().log_softmax(-1)
    ids_L1 = torch.tensor(request.prompt_ids[1:], dtype=torch.int64).unsqueeze(1)
    outputs = {"prompt_ids": ids_L1, "prompt_logprobs": log_probs_LV.gather(1, ids_L1)}
    return {name: F.pad(values_L1, (0, 0, 0, 1)).tolist() for name, values_L1 in outputs.items()}


def _prefill(
    model: PreTrainedModel, requests: Sequence[Request], logits_to_keep: int = 1
) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor]:
    """Run the unique prompts, padded on the left; return logits (B, L, V), cache, mask (B, P), next position (B,)."""
    prompts = [(request.prompt_ids, request.images) for request in requests]
    index = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    length_U = torch.tensor([len(ids) for ids, _ in index])
    P = int(length_U.max())
    # Padding may have any valid id: the mask hides it.
    input_ids_UP = torch.tensor([[0] * (P - len(ids)) + list(ids) for ids, _ in index])
    mask_UP = (torch.arange(P) >= (P - length_U).unsqueeze(1)).long()
    position_ids, next_U = (mask_UP.cumsum(-1) - 1).clamp_min(0), length_U
    if model.config.model_type in MROPE_MODEL_TYPES:
        by_prompt = [rope_positions(model, ids, images) for ids, images in index]
        position_ids = torch.stack([F.pad(x_3L, (P - x_3L.shape[1], 0)) for x_3L in by_prompt], dim=1)  # (3, U, P)
        next_U = position_ids.amax(dim=(0, 2)) + 1
    inputs = {}
    if shown := [images for _, images in index if images is not None]:
        inputs["pixel_values"] = torch.cat([images.pixel_values for images in shown]).to(model.dtype)
        inputs["image_grid_thw"] = torch.cat([images.image_grid_thw for images in shown])
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=input_ids_UP,
        attention_mask=mask_UP,
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=logits_to_keep,
        **inputs,
    )
    unique_B = torch.tensor([index[prompt] for prompt in prompts])
    cache.reorder_cache(unique_B)
    return output.logits[unique_B], cache, mask_UP[unique_B], next_U[unique_B]


def sample(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token of each sequence; return ``token_B`` int64 and ``log_prob_B`` float32 (nats)."""
    temperature_B1 = torch.tensor([p.temperature for p in params]).unsqueeze(1)
    greedy_B1 = temperature_B1 == 0
    scaled_BV = logits_BV.float() / torch.where(greedy_B1, 1.0, temperature_B1)
    for scores_1V, p in zip(scaled_BV.split(1), params, strict=True):
        if p.top_k > 0:
            scores_1V.copy_(TopKLogitsWarper(p.top_k)(None, scores_1V))
        if p.top_p < 1:
            scores_1V.copy_(TopPLogitsWarper(p.top_p)(None, scores_1V))
    log_probs_BV = scaled_BV.log_softmax(-1)
    # Inverse transform: one uniform number a sequence, so that its token does not depend on the batch.
    cumulative_BV = log_probs_BV.double().exp().cumsum(-1)
    uniform_B1 = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
    drawn_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)
    token_B1 = torch.where(greedy_B1, log_probs_BV.argmax(-1, keepdim=True), drawn_B1)
    return token_B1.squeeze(1), log_probs_BV.gather(1, token_B1).squeeze(1)
