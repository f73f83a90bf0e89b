"""verl's side of the rollout: what it cannot do is refused with the override that helps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import PreTrainedModel
from verl.workers.config import HFModelConfig, RolloutConfig

from verl_pg_plugin.cpu.rollout import HFReplica, ServerAdapter, server_name
from verl_pg_plugin.cpu.server import HFServer


def rollout_config(**fields: Any) -> RolloutConfig:
    defaults = {"name": "hf", "dtype": "float32", "tensor_model_parallel_size": 1}
    return RolloutConfig(**{**defaults, **fields})


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> ServerAdapter:
    return ServerAdapter(rollout_config(), HFModelConfig(path=str(checkpoint)), device_mesh=None, replica_rank=0)


def test_tensor_parallelism_and_reward_models_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_model_parallel_size=1"):
        HFReplica(0, rollout_config(tensor_model_parallel_size=2), None, gpus_per_node=2)
    with pytest.raises(ValueError, match="vllm or sglang for reward models"):
        HFReplica(0, rollout_config(), None, gpus_per_node=1, is_reward_model=True)


def test_delta_weights_and_unmerged_adapters_are_refused(adapter: ServerAdapter) -> None:
    with pytest.raises(ValueError, match="backend=naive"):
        asyncio.run(adapter.update_weights([], wire_format="delta_flush"))
    with pytest.raises(NotImplementedError, match=r"lora\.merge=True"):
        asyncio.run(adapter.update_weights([], peft_config={"r": 8}))


@pytest.mark.slow  # the trainings of tests/test_end_to_end.py do as much
def test_weights_reach_the_server_through_ray(
    checkpoint: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In buckets of a tensor each."""
    config = rollout_config(load_format="dummy")
    config.checkpoint_engine.__dict__["update_weights_bucket_megabytes"] = 0
    model_config = HFModelConfig(path=str(checkpoint))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    try:
        server = (
            ray.remote(HFServer)
            .options(name=server_name(0))
            .remote(config=config, model_config=model_config, replica_rank=0)
        )
        adapter = ServerAdapter(config, model_config, device_mesh=None, replica_rank=0)
        asyncio.run(adapter.update_weights(model.state_dict().items(), global_steps=5))
        output = ray.get(
            server.generate.remote(prompt_ids=[10, 11], sampling_params={"temperature": 0}, request_id="r")
        )
    finally:
        ray.shutdown()
    assert output.extra_fields["global_steps"] == 5
    with torch.no_grad():
        assert output.token_ids[0] == model(torch.tensor([[10, 11]])).logits[0, -1].argmax().item()


@pytest.mark.parametrize(
    ("trainer_mode", "class_name"),
    [("sync", "ReplayBuffer"), ("pg_sync", "ReplayBuffer"), ("pg_colocate_async", "ReplayBufferAsync")],
)
def test_the_replay_buffer_is_verls_for_the_trainer_mode(trainer_mode: str, class_name: str) -> None:
    from verl_pg_plugin.cpu.replay_buffer import prompt_replay_buffer

    buffer = prompt_replay_buffer(
        trainer_mode=trainer_mode,
        trainer_config={},
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs={"poll_interval": 0.25},
        refill_fn=None,
    )
    assert type(buffer).__name__ == class_name
    assert buffer.poll_interval == 0.25
