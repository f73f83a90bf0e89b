"""Rollout ``hf``: a verl rollout server that samples from a transformers model, one for each training worker.

Agent loops, load balancing, partial rollouts and weight synchronisation are verl's. With it, training runs and is
tested on machines without an inference engine.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import PreTrainedModel
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.model import get_hf_auto_model_class
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from verl_pg_plugin.cpu.generation import Completion, Request, SamplingParams, derived_seed, generate
from verl_pg_plugin.cpu.images import PromptImages
from verl_pg_plugin.modalities import MROPE_MODEL_TYPES


class HFServer:
    """Sample token ids and log-probs; verl calls every public method through Ray.

    Concurrent requests form one batch, and weights change between batches only. A request without a seed gets a hash
    of the run's seed, the training step, its prompt and the number of earlier requests for it in that step. So, with
    one server, runs of equal seeds and weights draw equal responses to each prompt, whatever else is in the batch.
    """

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, replica_rank: int) -> None:
        if config.logprobs_mode != "processed_logprobs":
            raise ValueError(
                f"rollout 'hf' returns log-probs of the distribution that it samples, not {config.logprobs_mode}; set "
                "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs"
            )
        self.config = config
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config)
        auto_class = get_hf_auto_model_class(self.model_config.hf_config)
        options = {
            "attn_implementation": "sdpa",  # independent of the trainer's: the server has a padded batch and a cache
            "dtype": PrecisionType.to_dtype(config.dtype),
            "trust_remote_code": self.model_config.trust_remote_code,
        }
        self.model: PreTrainedModel
        if config.load_format == "dummy":
            self.model = auto_class.from_config(deepcopy(self.model_config.hf_config), **options).eval()
        else:
            self.model = auto_class.from_pretrained(self.model_config.local_path, **options).eval()
        self.eos_token_ids: set[int] = set()
        for source in (self.model_config.generation_config, self.model_config.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            self.eos_token_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        self.max_model_len = config.max_model_len or self.model.config.get_text_config().max_position_embeddings
        self.global_steps: int | None = None
        self._seed = config.seed + replica_rank
        self._num_requests: Counter[Any] = Counter()  # of this step, by prompt
        # verl sends each expert's matrices separately; these are views of the model's.
        model_type = self.model.config.model_type
        self._weights = dict(unfuse_moe_params(self.model.state_dict().items(), model_type))
        # With load_format=dummy the weights are random until the trainer has sent all of them.
        sent = {name for name, _ in unfuse_moe_params(self.model.named_parameters(), model_type)}
        self._missing_weights = sent if config.load_format == "dummy" else set()
        self._pending: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._batching: asyncio.Task[None] | None = None
        self._model_lock = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()
        self._rejects = False

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        **multi_modal: Any,
    ) -> TokenOutput:
        """Draw one response; ``stop_reason`` is ``completed`` or ``aborted`` (then the tokens so far).

        With ``prompt_logprobs`` in ``sampling_params``, which verl sends to teachers, ``extra_fields`` has them and
        their ``prompt_ids``. ``image_data`` are PIL images of the prompt, in placeholder order.
        """
        if given := sorted(name for name, value in multi_modal.items() if value):
            raise ValueError(f"rollout 'hf' takes images only, but the request has {', '.join(given)}")
        request = self._request(tuple(prompt_ids), sampling_params, request_id, image_data)
        while not self._gate.is_set():
            if self._rejects:
                return self._token_output(Completion())
            await self._gate.wait()
        answer: asyncio.Future[Completion] = asyncio.Future()
        self._pending.append((request, answer))
        if self._batching is None or self._batching.done():
            self._batching = asyncio.create_task(self._answer_pending())
        return self._token_output(await answer)

    async def update_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Copy a bucket of weights into the model after the current batch."""
        if unexpected := sorted(named_tensors.keys() - self._weights.keys()):
            raise RuntimeError(
                f"weights {unexpected} do not exist in {type(self.model).__name__}; with LoRA set "
                "actor_rollout_ref.model.lora.merge=True"
            )
        async with self._model_lock:
            for name, tensor in named_tensors.items():
                weight = self._weights[name]
                if tensor.shape != weight.shape:
                    raise RuntimeError(f"{name} is {tuple(tensor.shape)}, the model has {tuple(weight.shape)}")
                with torch.no_grad():
                    weight.copy_(tensor)
        self._missing_weights -= named_tensors.keys()

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps
        self._num_requests.clear()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Stop all responses; later requests wait for ``resume_generation``, or return empty if rejected."""
        self._rejects = reject_request
        self._gate.clear()
        await self.sleep()

    async def resume_generation(self) -> None:
        self._gate.set()

    async def sleep(self) -> None:
        """Return once no request is pending. Weights stay in host memory."""
        if self._batching is not None:
            await self._batching

    async def wake_up(self, tags: list[str] | None = None, **kwargs: Any) -> None:
        """Do nothing: weights stay, a KV cache lives as long as its batch, and there is no profiler."""

    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = wake_up

    def _request(
        self, prompt_ids: tuple[int, ...], sampling_params: Mapping[str, Any], name: str, images: Sequence[Any] | None
    ) -> Request:
        room = self.max_model_len - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {self.max_model_len}; prompts "
                "need a token, and actor_rollout_ref.rollout.max_model_len sets the context"
            )
        model_type = self.model.config.model_type
        if images and model_type not in MROPE_MODEL_TYPES:
            raise ValueError(f"rollout 'hf' does not support images for {model_type}")
        prompt_images = PromptImages.process(self.model_config.processor, images) if images else None
        config = self.config
        sent = {"ignore_eos": config.ignore_eos, **sampling_params}
        default = min(config.response_length, config.prompt_length + config.response_length - len(prompt_ids))
        most = sent.pop("max_tokens", sent.pop("max_new_tokens", default))  # the latter is SGLang's name
        sent["max_tokens"] = max(1, min(most, room))
        prompt = prompt_ids, prompt_images and prompt_images.digest
        # An agent loop sends one seed for all turns; with the prompt, each turn has different random numbers.
        # With full_determinism a request has the same name in all runs, whatever the order of requests.
        parts = (self._seed, self.global_steps, prompt, name if config.full_determinism else self._num_requests[prompt])
        sent["seed"] = derived_seed(*(parts if sent.get("seed") is None else (sent["seed"], prompt)))
        params = SamplingParams.from_dict(sent)
        self._num_requests[prompt] += 1
        return Request(prompt_ids, params, prompt_images)

    async def _answer_pending(self) -> None:
        """Answer pending requests in batches until none is left."""
        size = self.config.max_num_seqs
        while self._pending:
            waiting = 0
            while waiting < len(self._pending) < size and self._gate.is_set():
                waiting = len(self._pending)
                await asyncio.sleep(0.05)  # agent loops send requests a few ms apart
            batch, self._pending = self._pending[:size], self._pending[size:]
            try:
                async with self._model_lock:
                    if self._missing_weights:
                        raise RuntimeError(
                            f"no weights were received for {sorted(self._missing_weights)[:4]}; generation started "
                            "before the trainer's first update_weights (or set "
                            "actor_rollout_ref.rollout.load_format=auto)"
                        )
                    completions = await asyncio.to_thread(
                        generate,
                        self.model,
                        [request for request, _ in batch],
                        eos_token_ids=self.eos_token_ids,
                        aborted=lambda: not self._gate.is_set(),
                    )
            except Exception as error:
                # Every caller gets the error; the server can still answer the next request.
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), completion in zip(batch, completions, strict=True):
                if not answer.done():
                    answer.set_result(completion)

    def _token_output(self, completion: Completion) -> TokenOutput:
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            stop_reason="aborted" if completion.aborted else "completed",
            extra_fields={"global_steps": self.global_steps, **completion.of_prompt},
        )


def server_name(replica_rank: int) -> str:
    """Return the name of a server's Ray actor."""
    return f"hf_server_{replica_rank}"


class HFReplica(RolloutReplica):
    """verl's handle on one server."""

    def __init__(self, replica_rank: int, config: RolloutConfig, model_config: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, model_config, **kwargs)
        if self.world_size != 1:
            raise ValueError(
                "rollout 'hf' runs in one process; set actor_rollout_ref.rollout.tensor_model_parallel_size=1, "
                "data_parallel_size=1 and pipeline_model_parallel_size=1"
            )
        if self.is_reward_model:
            raise ValueError("rollout 'hf' serves policies and teachers; use vllm or sglang for reward models")

    async def launch_servers(self) -> None:
        name = server_name(self.replica_rank)
        if self.is_teacher_model:
            name = f"{name}_teacher{self.name_suffix}"
        node_id = await self.workers[0].__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = {"name": name, "scheduling_strategy": where, "max_concurrency": self.max_concurrency}
        actor = ray.remote(HFServer).options(**options)
        server = actor.remote(config=self.config, model_config=self.model_config, replica_rank=self.replica_rank)
        await server.__ray_ready__.remote()
        # The address is the load balancer's key; there is no HTTP endpoint.
        self.servers, self._server_handle, self._server_address = [server], server, name


class ServerAdapter(BaseRollout):
    """A training worker's client of a server, by default that of its rank."""

    def __init__(
        self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

    @property
    def server(self) -> ActorHandle:  # servers start after the workers
        return ray.get_actor(server_name(self.replica_rank))

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the server's weights stay in memory."""

    async def release(self) -> None:
        """Wait for the server to finish its requests."""
        await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Send full weights to the server in buckets, which bound the use of Ray's object store."""
        if wire_format != "named_tensors":
            raise ValueError(
                f"rollout 'hf' takes full weights, not {wire_format!r}; set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
            )
        if peft_config is not None:
            raise NotImplementedError("rollout 'hf' has no adapter slots; set actor_rollout_ref.model.lora.merge=True")
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket: dict[str, torch.Tensor] = {}
        size = 0
        async for name, tensor in ensure_async_iterator(weights):
            bucket[name] = tensor.detach().cpu()
            size += tensor.nbytes
            if size >= limit:
                await self.server.update_weights.remote(bucket)
                bucket, size = {}, 0
        await self.server.update_weights.remote(bucket)
        if global_steps is not None:
            await self.server.set_global_steps.remote(global_steps)
