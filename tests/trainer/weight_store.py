"""verl's checkpoint engine ``store``: rollout servers without a GPU read the weights from a ``TCPStore``."""

import asyncio
import io
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

TIMEOUT = timedelta(minutes=10)
SENDER, OTHER_TRAINER, RECEIVER = range(3)


@CheckpointEngineRegistry.register("store")
class StoreCheckpointEngine(CheckpointEngine):
    """One worker; verl calls the methods from top to bottom for each transfer."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None: ...

    def prepare(self) -> dict[str, Any]:
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return {"host_name": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        parts = [SENDER, *[OTHER_TRAINER] * (actor_wg_world_size - 1)], [RECEIVER] * rollout_world_size
        trainers, receivers = ({"part": part, "address": [metadata[0]] * len(part)} for part in parts)
        return trainers, receivers

    def init_process_group(self, part: int, address: dict[str, Any]) -> None:
        self._part = part
        if part == RECEIVER:
            self._store = TCPStore(**address, is_master=False, timeout=TIMEOUT)

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Iterate the weights on every training worker, which gathers them; one worker sends."""
        on_host = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        if self._part == SENDER:
            buffer = io.BytesIO()
            torch.save(on_host, buffer)
            self._store.set("weights", buffer.getvalue())

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        data = await asyncio.to_thread(self._store.get, "weights")
        for item in torch.load(io.BytesIO(data), weights_only=True).items():
            yield item

    def finalize(self) -> None:
        self._store = None
