"""The four ways to run the actor and the reference policy, chosen by two flags that verl already has."""

from __future__ import annotations

from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.keys import USE_PREFIX_GROUPER, USE_REMOVE_PADDING

__all__ = ["USE_PREFIX_GROUPER", "USE_REMOVE_PADDING", "Mode", "is_set", "mode_by_flags", "mode_of"]


class Mode(Enum):
    """How sequences enter the model; the value is the name used in logs and run summaries."""

    PADDED = "padded"
    RMPAD = "rmpad"
    PADDED_GROUPS = "prefix_grouper"
    PACKED = "packed"

    @property
    def shares_prefixes(self) -> bool:
        """True for the modes that run this plugin's engine, False for stock verl."""
        return self in (Mode.PADDED_GROUPS, Mode.PACKED)


def mode_of(config: DictConfig) -> Mode:
    """Mode selected by ``actor.use_prefix_grouper`` and ``model.use_remove_padding``.

    Args:
        config: the resolved trainer config (verl's ``ppo_trainer`` or ours).
    """
    return mode_by_flags(OmegaConf.select(config, USE_PREFIX_GROUPER), OmegaConf.select(config, USE_REMOVE_PADDING))


def mode_by_flags(use_prefix_grouper: Any, use_remove_padding: Any) -> Mode:
    """Mode of one engine, whose model may have a padding flag of its own."""
    if is_set(use_prefix_grouper):
        return Mode.PACKED if is_set(use_remove_padding) else Mode.PADDED_GROUPS
    return Mode.RMPAD if is_set(use_remove_padding) else Mode.PADDED


def is_set(flag: Any) -> bool:
    """Whether a flag is on; for a word that is no boolean, and that the validators refuse, what its writer meant.

    Hydra reads ``off`` and ``no`` as words, and a word is true in Python.
    """
    return str(flag).lower() not in ("no", "n", "off", "false", "none", "0", "")
