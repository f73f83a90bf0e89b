"""Where things stand in verl's trainer config."""

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
STRATEGIES = (*FSDP_STRATEGIES, VEOMNI)
"""Strategies of verl for which this plugin has engines."""
