"""Keys of verl's trainer config."""

import math

from omegaconf import DictConfig, OmegaConf

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
CRITIC = "critic"
MODEL = "actor_rollout_ref.model"
CRITIC_MODEL = "critic.model"
ROLLOUT = "actor_rollout_ref.rollout"
OPTIONS = "prefix_grouper"

USE_PREFIX_GROUPER = f"{ACTOR}.use_prefix_grouper"
USE_REMOVE_PADDING = f"{MODEL}.use_remove_padding"

FSDP_STRATEGIES = ("fsdp", "fsdp2")
VEOMNI = "veomni"
OLD_LOG_PROB = f"++{OPTIONS}.old_log_prob"
FROM_UPDATE = "old_log_probs_from_update"
"""Entry of a batch: its old log-probs are those of the update, which computes entropy too."""

STRATEGIES = (*FSDP_STRATEGIES, VEOMNI)
"""verl's strategies for which this plugin has engines."""


def count_of(config: DictConfig, key: str) -> int:
    """Return a positive number as an integer, 0 for anything else. Micro-batch limits may be floats."""
    value = OmegaConf.select(config, key)
    return int(value) if type(value) in (int, float) and 1 <= value < math.inf else 0
