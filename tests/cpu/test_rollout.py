"""verl's side of the rollout: what it cannot do is refused with the override that helps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from verl.workers.config import HFModelConfig, RolloutConfig

from verl_pg_plugin.cpu.rollout import HFReplica, ServerAdapter


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
