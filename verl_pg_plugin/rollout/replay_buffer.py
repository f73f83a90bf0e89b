"""verl's replay buffer, which looks for finished responses every 0.1 s in place of every 2 s.

``trainer.v1.sampler.custom_sampler`` names ``prompt_replay_buffer``;
``+trainer.v1.sampler.sampler_kwargs.poll_interval`` sets other seconds.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


def prompt_replay_buffer(**kwargs: Any) -> ReplayBuffer:
    """Return the replay buffer of a trainer mode; ``kwargs`` is what verl's trainer gives to a custom sampler."""
    poll_interval = kwargs["sampler_kwargs"].get("poll_interval", 0.1)
    buffer_cls = ReplayBuffer if kwargs["trainer_mode"] == "sync" else ReplayBufferAsync
    return buffer_cls(**kwargs, poll_interval=poll_interval)
