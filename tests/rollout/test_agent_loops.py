"""verl's agent loops, its client and two servers of the CPU rollout, with the router that a config names."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from hydra import compose, initialize_config_module
from make_tiny_checkpoint import make_tiny_checkpoint
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopManager
from verl.workers.rollout.llm_server import LLMServerManager

from verl_pg_plugin.cpu.rollout import HFServer
from verl_pg_plugin.demo import PROBLEMS, chat

ROUTER = Path(__file__).parents[2] / "verl_pg_plugin/rollout/router.yaml"
N = 4


@pytest.fixture
def config(tmp_path: Path) -> Any:
    overrides = [
        "+machine=cpu",
        "hydra.searchpath=[pkg://verl_pg_plugin.config.hydra]",
        f"actor_rollout_ref.model.path={make_tiny_checkpoint(tmp_path / 'model', warm_up_steps=0)}",
        f"actor_rollout_ref.rollout.router_config_path={ROUTER}",
        "actor_rollout_ref.rollout.load_format=auto",
        "actor_rollout_ref.rollout.prompt_length=256",
        "actor_rollout_ref.rollout.response_length=8",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "actor_rollout_ref.rollout.nnodes=1",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


# Daily, the V0 run of tests/trainer reads from the router that each of its prompts was on one of two servers.
@pytest.mark.slow
def test_every_prompt_is_prefilled_on_one_server(config: Any, local_ray: None) -> None:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    manager = LLMServerManager.create_empty(config=config)
    servers = {f"server-{rank}": ray.remote(HFServer).remote(rollout, model, rank) for rank in range(2)}
    router = manager.global_load_balancer
    ray.get(router.add_servers.remote(servers))
    agent_loops = AgentLoopManager.create(config=config, llm_client=manager.get_client())

    questions = np.empty(8 * N, dtype=object)
    questions[:] = [chat(question) for question, _ in PROBLEMS[:8] for _ in range(N)]
    responses = agent_loops.generate_sequences(DataProto.from_dict(non_tensors={"raw_prompt": questions}))

    assert len(responses) == 8 * N
    # The CPU rollout counts the requests of a step by prompt and image.
    asked = ray.get([server.__ray_call__.remote(lambda server: dict(server._asked)) for server in servers.values()])
    prompts = [prompt_ids for counts in asked for prompt_ids, _ in counts]
    assert len(prompts) == len(set(prompts)) == 8
    assert {count for counts in asked for count in counts.values()} == {N}
    assert min(map(len, asked)) >= 2
    metrics = ray.get(router.take_metrics.remote())
    assert metrics.pop("prefix_grouper/rollout/requests_per_group") == N
    assert set(metrics.values()) == {1.0}
    while ray.get(router.get_total_inflight.remote()):  # verl does not wait for a release
        time.sleep(0.1)
