"""Weights reach rollout servers of their own as they were, in buckets, while all training workers gather them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from verl_pg_plugin.cpu.weight_store import StoreCheckpointEngine

WEIGHTS = {f"layer.{i}": torch.randn(4, i + 1) for i in range(5)} | {"half": torch.ones(3, dtype=torch.bfloat16)}


@pytest.mark.parametrize("bucket_size", [1, 64, 1 << 20], ids=["a tensor each", "some", "all at once"])
def test_every_receiver_gets_every_weight_and_a_second_time_the_new_ones(
    bucket_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    trainers, receivers = ([StoreCheckpointEngine(bucket_size) for _ in range(2)] for _ in range(2))
    for factor in (1, 2):
        weights = {name: tensor * factor for name, tensor in WEIGHTS.items()}
        assert sync(trainers, receivers, weights) == len(weights) * len(trainers)


def sync(trainers: list[StoreCheckpointEngine], receivers: list[StoreCheckpointEngine], weights: dict) -> int:
    """As verl's manager does it; how many weights the trainers have gathered."""
    metadata = [engine.prepare() for engine in (*trainers, *receivers)]
    topology = StoreCheckpointEngine.build_topology(len(trainers), len(receivers), metadata)
    for engines, kwargs in zip((trainers, receivers), topology, strict=True):
        for number, engine in enumerate(engines):
            engine.init_process_group(**{name: values[number] for name, values in kwargs.items()})
    gathered = []

    def gather():
        for name, tensor in weights.items():
            gathered.append(name)
            yield name, tensor

    async def receive(engine: StoreCheckpointEngine) -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in engine.receive_weights()}

    with ThreadPoolExecutor() as pool:
        received = [pool.submit(asyncio.run, receive(engine)) for engine in receivers]
        for engine in trainers:
            asyncio.run(engine.send_weights(gather()))
        for result in received:
            assert list(result.result(timeout=60)) == list(weights)
            assert all(torch.equal(tensor, weights[name]) for name, tensor in result.result().items())
    for engine in (*trainers, *receivers):
        engine.finalize()
    return len(gathered)
