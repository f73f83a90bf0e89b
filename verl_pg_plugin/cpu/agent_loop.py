"""verl's agent loop with a sampling seed of its own for every response, for the rollout ``hf``.

Plug it in through verl's own seam::

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_pg_plugin.cpu.agent_loop.SeededAgentLoopManager

A seed follows from the run's seed (``actor_rollout_ref.rollout.seed``), the training step, the row of the data set and
the session (which of the n responses), so what a request draws does not depend on when it arrives, on which server
answers it, or on what shares its batch. Two runs with one seed and the same weights sample the same tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_pg_plugin.cpu.sampling import derived_seed

PROMPT_SEED = "hf_prompt_seed"
"""The column that carries the seed of each prompt from the manager to its workers, int64 (number of prompts,)."""


class PromptSeeds:
    """Seeds of the prompts of one run, in the order in which the trainer submits them."""

    def __init__(self, run_seed: int) -> None:
        self.run_seed = run_seed
        self._step: int | None = None
        self._submitted: Counter[tuple[bool, Any]] = Counter()

    def of(self, step: int, validate: bool, rows: list[Any]) -> list[int]:
        """One seed a prompt.

        A row that is submitted again within a step draws anew: data sets without ``extra_info.index`` call every
        row 0, and some repeat theirs.

        Args:
            step: the trainer's ``global_steps``.
            validate: whether the prompts are for validation.
            rows: the ``index`` of each prompt in its data set.
        """
        if step != self._step:
            self._step, self._submitted = step, Counter()
        seeds = []
        for row in rows:
            seeds.append(derived_seed(self.run_seed, step, validate, row, self._submitted[validate, row]))
            self._submitted[validate, row] += 1
        return seeds


# An actor class cannot be subclassed; the class that it wraps can.
@ray.remote
class SeededAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker; every session asks its server with a seed."""

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, session_id: int, **kwargs: Any
    ) -> Any:
        seed = derived_seed(int(kwargs.pop(PROMPT_SEED)), session_id)
        return await super()._run_agent_loop(
            {**sampling_params, "seed": seed}, trajectory, session_id=session_id, **kwargs
        )


class SeededAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager; gives every prompt its seed before it goes to a worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = SeededAgentLoopWorker
        self._seeds = PromptSeeds(self.rollout_config.seed)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Hand the prompts to the workers without waiting for responses."""
        validate = bool(prompts["validate"]) if "validate" in prompts else False
        seeds = self._seeds.of(int(prompts["global_steps"]), validate, list(prompts["index"]))
        prompts[PROMPT_SEED] = torch.tensor(seeds, dtype=torch.int64)
        super().generate_sequences(prompts)
