"""A replay buffer that looks for finished responses more often than verl's.

verl's V1 trainers ask every two seconds whether a batch has been sampled, which is little beside a GPU rollout
and longer than a whole step of a tiny model. Plug it in through verl's own seam::

    trainer.v1.sampler.custom_sampler.path=pkg://verl_pg_plugin.cpu.replay_buffer
    trainer.v1.sampler.custom_sampler.name=prompt_replay_buffer
    +trainer.v1.sampler.sampler_kwargs.poll_interval=0.1
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

DEFAULT_POLL_INTERVAL_S = 0.1


def prompt_replay_buffer(**kwargs: Any) -> ReplayBuffer:
    """verl's replay buffer for the trainer mode, with ``sampler_kwargs.poll_interval`` seconds between looks.

    Args:
        kwargs: what verl's trainer gives to a custom sampler.
    """
    synchronous = kwargs["trainer_mode"].removeprefix("pg_") == "sync"
    poll_interval = kwargs["sampler_kwargs"].get("poll_interval", DEFAULT_POLL_INTERVAL_S)
    return (ReplayBuffer if synchronous else ReplayBufferAsync)(**kwargs, poll_interval=poll_interval)
