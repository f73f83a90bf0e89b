"""Generation server of the ``hf`` rollout: a transformers model behind the calls verl makes on a rollout server.

Concurrent requests are answered in one batch. Weights only move between batches, and a closed gate (after
:meth:`HFServer.abort_all_requests`) holds new requests until :meth:`HFServer.resume_generation`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from verl_pg_plugin.architectures import auto_class
from verl_pg_plugin.cpu.generation import Completion, Request, generate
from verl_pg_plugin.cpu.pictures import PromptPictures, reads_pictures
from verl_pg_plugin.cpu.received_weights import copy_weights, received_parameters, received_weights
from verl_pg_plugin.cpu.sampling import LOGPROBS_MODES, SamplingParams, derived_seed

logger = logging.getLogger(__name__)

# How long to wait for one more request before a batch starts: agent loops send theirs a few ms apart.
_ARRIVAL_GAP_S = 0.05


@dataclass(frozen=True)
class _Pending:
    request: Request
    completion: asyncio.Future[Completion]


class HFServer:
    """Samples token ids and log-probs; every public method is called by verl through Ray.

    Args:
        config: verl's rollout config; read are ``dtype``, ``seed``, ``max_num_seqs``, ``max_model_len``,
            ``prompt_length``, ``response_length``, ``ignore_eos``, ``logprobs_mode`` and ``load_format``.
        model_config: verl's model config; its own ``trust_remote_code`` decides about remote code.
        replica_rank: index of this server; offsets the seed.

    Raises:
        ValueError: ``logprobs_mode`` is not one of ``processed_logprobs`` and ``raw_logprobs``.
    """

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, replica_rank: int) -> None:
        if config.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(
                f"actor_rollout_ref.rollout.logprobs_mode={config.logprobs_mode} is unknown to rollout 'hf'; "
                f"choose one of {', '.join(LOGPROBS_MODES)}"
            )
        self.config = config
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config)
        self.model = _build_model(self.model_config, config)
        self.eos_token_ids = _eos_token_ids(self.model_config)
        self.global_steps: int | None = None
        self._generator = torch.Generator().manual_seed(config.seed + replica_rank)
        # With load_format=dummy the weights are noise until the trainer has sent its own.
        self._weights = received_weights(self.model)
        self._missing_weights = received_parameters(self.model) if config.load_format == "dummy" else set()
        self._unanswered = 0
        self._pending: list[_Pending] = []
        self._model_lock = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()
        self._reject_request = False
        self._abort = threading.Event()
        self._batching: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        **multi_modal: Any,
    ) -> TokenOutput:
        """Draw one response.

        Args:
            prompt_ids: token ids of the prompt.
            sampling_params: vLLM's names; see :class:`verl_pg_plugin.cpu.sampling.SamplingParams`.
            request_id: unused, requests are told apart by their futures.
            image_data: PIL images of the prompt, in the order of their placeholders.
            multi_modal: must all be ``None``: the rollout shows images alone.

        Returns:
            ``token_ids`` with the end token if there is one, their ``log_probs``, and ``stop_reason``
            ``completed`` or ``aborted`` (then the tokens so far).

        Raises:
            ValueError: video or audio were given, or images to a model that reads none, or the prompt leaves no room
                for a response.
        """
        given = sorted(name for name, value in multi_modal.items() if value)
        if given:
            raise ValueError(f"rollout 'hf' shows images alone, but the request carries {', '.join(given)}")
        params = self._sampling_params(sampling_params, len(prompt_ids))
        if params.seed is not None:
            # An agent loop sends one seed for all turns; with it alone every turn would meet the same random numbers.
            params = replace(params, seed=derived_seed(params.seed, tuple(prompt_ids)))
        request = Request(tuple(prompt_ids), params, self._pictures(image_data))
        while not self._gate.is_set():
            if self._reject_request:
                return self._token_output(Completion([], [], "abort"))
            await self._gate.wait()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(request, future))
        if self._batching is None or self._batching.done():
            self._batching = asyncio.create_task(self._answer_pending())
        self._unanswered += 1
        try:
            return self._token_output(await future)
        finally:
            self._unanswered -= 1

    async def update_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Copy a bucket of weights into the model, after the batch in flight.

        Raises:
            RuntimeError: a name or a shape the model does not have.
        """
        unexpected = sorted(named_tensors.keys() - self._weights.keys())
        if unexpected:
            raise RuntimeError(
                f"weights {unexpected} do not exist in {type(self.model).__name__}; with LoRA set "
                "actor_rollout_ref.model.lora.merge=True"
            )
        async with self._model_lock:
            copy_weights(self._weights, named_tensors)
        self._missing_weights -= named_tensors.keys()

    async def set_global_steps(self, global_steps: int) -> None:
        """Tag later responses with the training step of their weights."""
        self.global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Stop every response where it stands and close the gate.

        Args:
            reject_request: answer requests that arrive at the closed gate with an empty aborted response
                instead of holding them until :meth:`resume_generation`.
        """
        self._reject_request = reject_request
        self._gate.clear()
        self._abort.set()
        unanswered = self._unanswered
        await self.wait_for_requests_to_drain()
        self._abort.clear()
        return {"aborted_count": unanswered}

    async def resume_generation(self) -> None:
        """Open the gate that :meth:`abort_all_requests` closed."""
        self._reject_request = False
        self._gate.set()

    async def wait_for_requests_to_drain(self) -> None:
        """Return once no request is pending."""
        if self._batching is not None:
            await self._batching

    async def sleep(self) -> None:
        """Finish what is pending. Weights stay: host memory is not what training runs out of."""
        await self.wait_for_requests_to_drain()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing to restore after :meth:`sleep`."""

    async def clear_kv_cache(self) -> None:
        """Nothing to clear: a KV cache lives as long as its batch."""

    async def release_kv_cache(self) -> None:
        """Nothing to release: a KV cache lives as long as its batch."""

    async def resume_kv_cache(self) -> None:
        """Nothing to restore: a KV cache lives as long as its batch."""

    async def start_profile(self, **kwargs: Any) -> None:
        """The server has no profiler of its own; verl's profilers of the training workers are unaffected."""
        logger.info("rollout 'hf' is not profiled")

    async def stop_profile(self) -> None:
        """See :meth:`start_profile`."""

    def _pictures(self, images: Sequence[Any] | None) -> PromptPictures | None:
        if not images:
            return None
        if not reads_pictures(self.model.config):
            raise ValueError(f"rollout 'hf' has no way to show {self.model.config.model_type} an image")
        return PromptPictures.process(self.model_config.processor, images)

    def _sampling_params(self, sampling_params: Mapping[str, Any], prompt_length: int) -> SamplingParams:
        config = self.config
        max_model_len = config.max_model_len or self.model.config.get_text_config().max_position_embeddings
        room = max_model_len - prompt_length
        if prompt_length < 1 or room < 1:
            raise ValueError(
                f"a prompt of {prompt_length} tokens leaves no room in a context of {max_model_len}; a prompt needs "
                "at least one token, and actor_rollout_ref.rollout.max_model_len sets the context"
            )
        default = min(config.response_length, config.prompt_length + config.response_length - prompt_length)
        params = {"ignore_eos": config.ignore_eos, **sampling_params}
        for name in {"max_tokens", "max_new_tokens"} & params.keys():
            params[name] = max(1, min(params[name], room))
        return SamplingParams.from_dict(params, default_max_tokens=max(1, min(default, room)))

    async def _answer_pending(self) -> None:
        """Answer pending requests batch by batch until none is left."""
        while self._pending:
            waiting = 0
            while waiting < len(self._pending) < self.config.max_num_seqs and not self._abort.is_set():
                waiting = len(self._pending)
                await asyncio.sleep(_ARRIVAL_GAP_S)
            size = self.config.max_num_seqs
            batch, self._pending = self._pending[:size], self._pending[size:]
            try:
                completions = await self._generate([pending.request for pending in batch])
            except Exception as error:
                # Every caller gets the error; the server stays able to answer the next request.
                for pending in batch:
                    if not pending.completion.done():
                        pending.completion.set_exception(error)
                continue
            for pending, completion in zip(batch, completions, strict=True):
                if not pending.completion.done():
                    pending.completion.set_result(completion)

    async def _generate(self, requests: list[Request]) -> list[Completion]:
        async with self._model_lock:
            if self._missing_weights:
                raise RuntimeError(
                    f"no weights were received for {sorted(self._missing_weights)[:4]}; generation started "
                    "before the trainer's first update_weights (or set actor_rollout_ref.rollout.load_format=auto)"
                )
            return await asyncio.to_thread(
                generate,
                self.model,
                requests,
                eos_token_ids=self.eos_token_ids,
                generator=self._generator,
                logprobs_mode=self.config.logprobs_mode,
                aborted=self._abort.is_set,
            )

    def _token_output(self, completion: Completion) -> TokenOutput:
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            stop_reason="aborted" if completion.finish_reason == "abort" else "completed",
            extra_fields={"global_steps": self.global_steps},
        )


def _build_model(model_config: HFModelConfig, config: RolloutConfig) -> PreTrainedModel:
    dtype = PrecisionType.to_dtype(config.dtype)
    # SDPA whatever the trainer's attention is: the server has its own layout and its own cache.
    options = {
        "attn_implementation": "sdpa",
        "dtype": dtype,
        "trust_remote_code": model_config.trust_remote_code,
    }
    if config.load_format == "dummy":
        model = auto_class(model_config.hf_config).from_config(deepcopy(model_config.hf_config), **options)
    else:
        model = auto_class(model_config.hf_config).from_pretrained(model_config.local_path, **options)
    return model.eval()


def _eos_token_ids(model_config: HFModelConfig) -> frozenset[int]:
    sources = (model_config.generation_config, model_config.tokenizer)
    ids = [getattr(source, "eos_token_id", None) for source in sources]
    return frozenset(
        token for item in ids if item is not None for token in (item if isinstance(item, list) else [item])
    )
