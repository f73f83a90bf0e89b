"""A replay buffer that looks for finished responses more often than verl's.

verl's V1 trainers look every two seconds, which is longer than a whole step of a tiny model. Plug it in through verl's
own setting, with ``+trainer.v1.sampler.sampler_kwargs.poll_interval`` in seconds, 0.1 by default::

    trainer.v1.sampler.custom_sampler.path=pkg://verl_pg_plugin.cpu.replay_buffer
    trainer.v1.sampler.custom_sampler.name=prompt_replay_buffer
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


def prompt_replay_buffer(**kwargs: Any) -> ReplayBuffer:
    """verl's replay buffer for the trainer mode; ``kwargs`` is what its trainer gives to a custom sampler."""
    synchronous = kwargs["trainer_mode"].removeprefix("pg_") == "sync"
    poll_interval = kwargs["sampler_kwargs"].get("poll_interval", 0.1)
    return (ReplayBuffer if synchronous else ReplayBufferAsync)(**kwargs, poll_interval=poll_interval)
