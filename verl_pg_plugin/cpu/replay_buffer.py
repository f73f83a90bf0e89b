"""A replay buffer that looks for finished responses more often than verl's, for ``trainer.v1.sampler.custom_sampler``.

verl's V1 trainers look every two seconds, longer than a whole step of a tiny model; this one every
``+trainer.v1.sampler.sampler_kwargs.poll_interval`` seconds, 0.1 by default.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


def prompt_replay_buffer(**kwargs: Any) -> ReplayBuffer:
    """verl's replay buffer for the trainer mode; ``kwargs`` is what its trainer gives to a custom sampler."""
    poll_interval = kwargs["sampler_kwargs"].get("poll_interval", 0.1)
    buffer_cls = ReplayBuffer if kwargs["trainer_mode"] == "sync" else ReplayBufferAsync
    return buffer_cls(**kwargs, poll_interval=poll_interval)
