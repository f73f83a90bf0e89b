"""verl's agent loop of the V0 trainer with a sampling seed for every response; see ``cpu.agent_loop``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import ray
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.utils.ray_utils import auto_await

from verl_pg_plugin.cpu.prompt_seeds import PromptSeeds
from verl_pg_plugin.cpu.sampling import derived_seed

SEED = "hf_seed"
"""The column that carries the seed of each response from the manager to its workers, int64 (number of responses,)."""


class SeededAgentLoopWorkerV0(AgentLoopWorker):
    """verl's worker; every session asks its server with a seed."""

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        seed = int(kwargs.pop(SEED))
        return await super()._run_agent_loop({**sampling_params, "seed": seed}, trajectory, **kwargs)


class SeededAgentLoopManagerV0(AgentLoopManager):
    """verl's manager; gives every response its seed before it goes to a worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(SeededAgentLoopWorkerV0)
        super().__init__(*args, **kwargs)
        self._seeds = PromptSeeds(self.rollout_config.seed)

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Draw one response for each of B rows.

        V0 has repeated every prompt already: its rows have one uid, and the k-th of them is session k.
        """
        rows = prompts.non_tensor_batch
        uids = rows["uid"].tolist()
        first_row_of = {uid: row for row, uid in reversed(list(enumerate(uids)))}
        first_rows = sorted(first_row_of.values())
        prompt_seeds = self._seeds.of(
            int(prompts.meta_info["global_steps"]),
            bool(prompts.meta_info.get("validate", False)),
            [rows["index"][row] for row in first_rows],
        )
        seed_of = dict(zip(first_rows, prompt_seeds, strict=True))
        sessions: Counter[str] = Counter()
        seeds = []
        for uid in uids:
            seeds.append(derived_seed(seed_of[first_row_of[uid]], sessions[uid]))
            sessions[uid] += 1
        rows[SEED] = np.array(seeds, dtype=np.int64)
        return await super().generate_sequences(prompts)
