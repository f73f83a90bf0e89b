"""Where things stand in verl's trainer config."""

from __future__ import annotations

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
"""Strategies of verl for which this plugin has engines."""

TRAINER_PREFIX = "pg_"
"""verl's registry of V1 trainers holds one class per name: ``pg_X`` is that of ``X`` that keeps groups together."""


def group_keeping(mode: str) -> str:
    """The name that stands for a V1 trainer mode with groups kept together; a name that does already stays."""
    return TRAINER_PREFIX + mode.removeprefix(TRAINER_PREFIX)
