"""verl's replay buffer with a poll interval of 0.1 s instead of 2 s.

Set ``prompt_replay_buffer`` as ``trainer.v1.sampler.custom_sampler``;
``+trainer.v1.sampler.sampler_kwargs.poll_interval`` sets another interval in seconds.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


def prompt_replay_buffer(**kwargs: Any) -> ReplayBuffer:
    """Return the replay buffer of a trainer mode; verl's trainer passes ``kwargs`` to a custom sampler."""
    poll_interval = kwargs["sampler_kwargs"].get("poll_interval", 0.1)
    buffer_cls = ReplayBuffer if kwargs["trainer_mode"] == "sync" else ReplayBufferAsync
    return buffer_cls(**kwargs, poll_interval=poll_interval)
