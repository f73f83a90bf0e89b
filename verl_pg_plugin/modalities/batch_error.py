"""What is wrong with a batch."""

SHARING_OFF = "set actor_rollout_ref.actor.use_prefix_grouper=False"


class BatchError(ValueError):
    """A batch that packed mode cannot compute; the message names the cause and the fix."""
