"""Rollout ``hf``: one :class:`HFServer` for each training worker, fed with the worker's weights.

Agent loops, load balancing, partial rollouts and weight synchronisation are verl's own. It exists so that training can
run, and be tested, where no inference engine can.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from verl_pg_plugin.cpu.server import HFServer


def server_name(replica_rank: int) -> str:
    """Name of a server's Ray actor, by which workers find it."""
    return f"hf_server_{replica_rank}"


class HFReplica(RolloutReplica):
    """verl's handle on one server."""

    def __init__(self, replica_rank: int, config: RolloutConfig, model_config: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, model_config, **kwargs)
        if self.world_size != 1:
            raise ValueError(
                "rollout 'hf' runs a whole model in one process; set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1, data_parallel_size=1 and "
                "pipeline_model_parallel_size=1"
            )
        if self.is_reward_model:
            raise ValueError("rollout 'hf' serves policies and teachers; use vllm or sglang for reward models")

    async def launch_servers(self) -> None:
        name = server_name(self.replica_rank)
        if self.is_teacher_model:
            name = f"{name}_teacher{self.name_suffix}"
        node_id = await self.workers[0].__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
        server = (
            ray.remote(HFServer)
            .options(
                name=name,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                max_concurrency=self.max_concurrency,
            )
            .remote(config=self.config, model_config=self.model_config, replica_rank=self.replica_rank)
        )
        await server.__ray_ready__.remote()
        self.servers = [server]
        self._server_handle = server
        # The load balancer's key. There is no HTTP endpoint behind it.
        self._server_address = name


class ServerAdapter(BaseRollout):
    """A training worker's side of its server, by default the one of its rank: sends weights, passes on sleep."""

    def __init__(
        self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

    @property
    def server(self) -> ActorHandle:  # looked up late: servers start after the workers
        return ray.get_actor(server_name(self.replica_rank))

    async def resume(self, tags: list[str]) -> None:
        """Nothing: the server's weights stay where they are."""

    async def release(self) -> None:
        """Let the server finish before training."""
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
        """Send full weights to the server in buckets, which bound what lies in Ray's object store."""
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
