"""verl's agent loop of the V1 trainer with a sampling seed for every response; see ``cpu.agent_loop``."""

from __future__ import annotations

from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_pg_plugin.cpu.prompt_seeds import PromptSeeds
from verl_pg_plugin.cpu.sampling import derived_seed

PROMPT_SEED = "hf_prompt_seed"
"""The column that carries the seed of each prompt from the manager to its workers, int64 (number of prompts,)."""


# An actor class cannot be subclassed; the class that it wraps can.
@ray.remote
class SeededAgentLoopWorkerV1(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker; every session asks its server with a seed."""

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, session_id: int, **kwargs: Any
    ) -> Any:
        seed = derived_seed(int(kwargs.pop(PROMPT_SEED)), session_id)
        return await super()._run_agent_loop(
            {**sampling_params, "seed": seed}, trajectory, session_id=session_id, **kwargs
        )


class SeededAgentLoopManagerV1(AgentLoopManagerTQ):
    """verl's manager; gives every prompt its seed before it goes to a worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = SeededAgentLoopWorkerV1
        self._seeds = PromptSeeds(self.rollout_config.seed)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Hand the prompts to the workers without waiting for responses."""
        validate = bool(prompts["validate"]) if "validate" in prompts else False
        seeds = self._seeds.of(int(prompts["global_steps"]), validate, list(prompts["index"]))
        prompts[PROMPT_SEED] = torch.tensor(seeds, dtype=torch.int64)
        super().generate_sequences(prompts)
