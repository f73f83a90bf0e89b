"""verl's agent loop with a sampling seed of its own for every response, for the rollout ``hf``.

Plug it in through verl's own seam::

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_pg_plugin.cpu.agent_loop.SeededAgentLoopManager

A seed follows from the run's seed (``actor_rollout_ref.rollout.seed``), the training step, the row of the data set and
the session (which of the n responses), so what a request draws does not depend on when it arrives, on which server
answers it, or on what shares its batch. Two runs with one seed and the same weights sample the same tokens, under the
V1 trainer and under V0.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

__all__ = ["SeededAgentLoopManager"]


class SeededAgentLoopManager:
    """Stands for the manager of the trainer that a run has; verl only calls ``create``."""

    @classmethod
    def create(cls, config: DictConfig, *args: Any, **kwargs: Any) -> Any:
        """verl's own ``create`` of the manager for V1, with TransferQueue, or for V0."""
        if config.trainer.use_v1:
            from verl_pg_plugin.cpu.agent_loop_v1 import SeededAgentLoopManagerV1

            return SeededAgentLoopManagerV1.create(config, *args, **kwargs)
        from verl_pg_plugin.cpu.agent_loop_v0 import SeededAgentLoopManagerV0

        return SeededAgentLoopManagerV0.create(config, *args, **kwargs)
