"""What the rows of the rule table are made of: where they look, what offends there, and how to word the fix."""

from __future__ import annotations

from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.architectures.checks import REPLACED_ATTENTION
from verl_pg_plugin.config.engine_config import PrefixGrouperEngineConfig
from verl_pg_plugin.config.mode import USE_PREFIX_GROUPER, USE_REMOVE_PADDING, Mode
from verl_pg_plugin.config.rule import CRITIC, REF, Offends, add_as, set_to
from verl_pg_plugin.config.violation import Setting

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
OPTIONS = "prefix_grouper"
ENGINE_CONFIG = "verl_pg_plugin.config.PrefixGrouperEngineConfig"

ALL = frozenset(Mode)
PADDED = frozenset({Mode.PREFIX_GROUPER})
PACKED = frozenset({Mode.PACKED})
SHARING = frozenset({Mode.PREFIX_GROUPER, Mode.PACKED})

FSDP_STRATEGIES = ("fsdp", "fsdp2")

# Predicates: (value, config) -> does it break the rule


def is_on(value: Any, config: DictConfig) -> bool:
    return bool(value)


def is_off(value: Any, config: DictConfig) -> bool:
    return value is not None and not value


def above_one(value: Any, config: DictConfig) -> bool:
    return value is not None and value > 1


def is_verifying(value: Any, config: DictConfig) -> bool:
    return value not in (None, "off", False)  # YAML reads a bare off as False


def splits_groups(value: Any, config: DictConfig) -> bool:
    n = OmegaConf.select(config, f"{ROLLOUT}.n")
    if not isinstance(value, int) or not isinstance(n, int) or n < 1:
        return False  # verl's own checks speak
    return value % n != 0


def differs_from_model(value: Any, config: DictConfig) -> bool:
    return value is not None and bool(value) != bool(OmegaConf.select(config, USE_REMOVE_PADDING))


def is_not_fsdp(value: Any, config: DictConfig) -> bool:
    return value not in FSDP_STRATEGIES


def is_other_attention(value: Any, config: DictConfig) -> bool:
    return value is not None and value not in REPLACED_ATTENTION


def is_stock_engine_config(value: Any, config: DictConfig) -> bool:
    if is_not_fsdp(OmegaConf.select(config, f"{ACTOR}.strategy"), config):
        return False  # the strategy rule speaks: there is no fsdp_config to look at
    return value is None or not issubclass(get_class(value), PrefixGrouperEngineConfig)


def differs_from_actor(value: Any, config: DictConfig) -> bool:
    if is_not_fsdp(OmegaConf.select(config, f"{ACTOR}.strategy"), config):
        return False
    return bool(value) != bool(OmegaConf.select(config, USE_PREFIX_GROUPER))


def stays_uncompiled(strategy_key: str) -> Offends:
    """Whether compiled layers are asked for under FSDP1 without ``use_orig_params``, the value."""
    return lambda value, config: (
        bool(OmegaConf.select(config, f"{OPTIONS}.compile_layers"))
        and OmegaConf.select(config, strategy_key) == "fsdp"
        and not value
    )


# Fixes: (offending settings, config) -> override


def next_multiple_of_n(settings: tuple[Setting, ...], config: DictConfig) -> str:
    n = OmegaConf.select(config, f"{ROLLOUT}.n")
    return " ".join(f"{setting.key}={-(-setting.value // n) * n}" for setting in settings)


def follow_model(settings: tuple[Setting, ...], config: DictConfig) -> str:
    return set_to(str(bool(OmegaConf.select(config, USE_REMOVE_PADDING))))(settings, config)


def follow_actor(settings: tuple[Setting, ...], config: DictConfig) -> str:
    return add_as(str(bool(OmegaConf.select(config, USE_PREFIX_GROUPER))))(settings, config)


def in_both_roles(*names: str) -> tuple[str, ...]:
    return tuple(f"{role}.{name}" for role in (ACTOR, REF) for name in names)


def in_engine_configs(name: str) -> tuple[str, ...]:
    return (*in_both_roles(f"fsdp_config.{name}"), f"{CRITIC}.fsdp.{name}")


def in_models(name: str) -> tuple[str, ...]:
    return (f"{MODEL}.{name}", f"{CRITIC}.model.{name}")
