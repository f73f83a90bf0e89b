"""verl's checkpoint engine ``store``: weights from training workers to rollout servers of their own, without a GPU.

The first training worker puts buckets of weights into a ``TCPStore``, from which every rollout worker reads them all.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

BACKEND = "store"
TIMEOUT = timedelta(minutes=10)
SENDER, OTHER_TRAINER, RECEIVER = range(3)


@CheckpointEngineRegistry.register(BACKEND)
class StoreCheckpointEngine(CheckpointEngine):
    """One worker's end; verl calls the methods from top to bottom each time it sends weights."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self._part = OTHER_TRAINER
        self._store: TCPStore | None = None

    def prepare(self) -> dict[str, Any]:
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return {"host": host, "port": self._store.port}

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
            self._store = TCPStore(address["host"], address["port"], is_master=False, timeout=TIMEOUT)
        elif part == OTHER_TRAINER:
            self._store = None

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Go through the weights, on every training worker since that gathers them; one of them sends."""
        bucket: dict[str, torch.Tensor] = {}
        size = number = 0
        for name, tensor in weights:
            if self._part != SENDER:
                continue
            if bucket and size + tensor.nbytes > self.bucket_size:
                self._put(number, bucket, is_last=False)
                bucket, size, number = {}, 0, number + 1
            bucket[name] = tensor.detach().cpu()
            size += tensor.nbytes
        if self._part == SENDER:
            self._put(number, bucket, is_last=True)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        assert self._store is not None, "verl prepares an engine before it receives"
        number, is_last = 0, False
        while not is_last:
            data = await asyncio.to_thread(self._store.get, str(number))
            content = torch.load(io.BytesIO(data), weights_only=True)
            is_last, number = content["is_last"], number + 1
            for name, tensor in content["bucket"].items():
                yield name, tensor

    def finalize(self) -> None:
        self._store = None

    def _put(self, number: int, bucket: dict[str, torch.Tensor], is_last: bool) -> None:
        assert self._store is not None, "verl prepares an engine before it sends"
        buffer = io.BytesIO()
        torch.save({"bucket": bucket, "is_last": is_last}, buffer)
        self._store.set(str(number), buffer.getvalue())
