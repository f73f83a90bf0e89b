"""The four ways to run the actor and the reference policy, chosen by two flags that verl already has."""

from __future__ import annotations

from enum import Enum

from omegaconf import DictConfig, OmegaConf

USE_PREFIX_GROUPER = "actor_rollout_ref.actor.use_prefix_grouper"
USE_REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"


class Mode(Enum):
    """How sequences enter the model; the value is the name used in logs and run summaries."""

    PADDED = "padded"
    RMPAD = "rmpad"
    PREFIX_GROUPER = "prefix_grouper"
    PACKED = "packed"

    @property
    def shares_prefixes(self) -> bool:
        """True for the modes that run this plugin's engine, False for stock verl."""
        return self in (Mode.PREFIX_GROUPER, Mode.PACKED)


def mode_of(config: DictConfig) -> Mode:
    """Mode selected by ``actor.use_prefix_grouper`` and ``model.use_remove_padding``.

    Args:
        config: the resolved trainer config (verl's ``ppo_trainer`` or ours).
    """
    use_prefix_grouper = bool(OmegaConf.select(config, USE_PREFIX_GROUPER, default=False))
    use_remove_padding = bool(OmegaConf.select(config, USE_REMOVE_PADDING, default=False))
    if use_prefix_grouper:
        return Mode.PACKED if use_remove_padding else Mode.PREFIX_GROUPER
    return Mode.RMPAD if use_remove_padding else Mode.PADDED
