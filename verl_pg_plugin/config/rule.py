"""One row of the validators' rule table: where it looks, what offends, and how the user fixes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from verl_pg_plugin.config.mode import USE_REMOVE_PADDING, Mode
from verl_pg_plugin.config.violation import Setting, Violation

__all__ = ["CRITIC", "REF", "Fix", "Offends", "Rule", "add_as", "packed_or", "set_to"]

REF = "actor_rollout_ref.ref"
CRITIC = "critic"

Offends = Callable[[Any, DictConfig], bool]
Fix = Callable[[tuple[Setting, ...], DictConfig], str]


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Args:
        name: stable name, shown nowhere but in tests and ``Violation.rule``.
        modes: modes in which the rule holds.
        keys: config entries it looks at; those of the reference policy and the critic count only when there is one.
        offends: whether a value of such an entry (None when absent) breaks the rule.
        why: cause in one sentence, without a final full stop.
        fix: builds the override that fixes it from the offending settings.
    """

    name: str
    modes: frozenset[Mode]
    keys: tuple[str, ...]
    offends: Offends
    why: str
    fix: Fix

    def violation(self, config: DictConfig, mode: Mode) -> Violation | None:
        """The rule's violation in ``config`` (every interpolation resolvable), or None."""
        if mode not in self.modes:
            return None
        settings = tuple(
            Setting(key, value)
            for key in self.keys
            if not key.startswith(f"{REF}.") or need_reference_policy(config)
            if not key.startswith(f"{CRITIC}.") or need_critic(config)
            if self.offends(value := OmegaConf.select(config, key), config)
        )
        if not settings:
            return None
        settings = _without_followers(settings, config)
        return Violation(self.name, settings, self.why, self.fix(settings, config))


def _without_followers(settings: tuple[Setting, ...], config: DictConfig) -> tuple[Setting, ...]:
    """Drop settings that interpolate another offending one: fixing that one fixes them."""
    keys = {setting.key for setting in settings}

    def follows_another(key: str) -> bool:
        parent, _, leaf = key.rpartition(".")
        section = OmegaConf.select(config, parent)
        if section is None or leaf not in section or not OmegaConf.is_interpolation(section, leaf):
            return False
        expression = str(OmegaConf.to_container(section, resolve=False)[leaf])  # type: ignore[index, call-overload]
        return any(other in expression for other in keys - {key})

    return tuple(setting for setting in settings if not follows_another(setting.key))


def set_to(value: str) -> Fix:
    return lambda settings, config: " ".join(f"{setting.key}={value}" for setting in settings)


def add_as(value: str) -> Fix:
    return lambda settings, config: " ".join(f"++{setting.key}={value}" for setting in settings)


def packed_or(fix: Fix) -> Fix:
    packed = f"{USE_REMOVE_PADDING}=True (selects packed mode, which supports it)"
    return lambda settings, config: f"{packed}, or {fix(settings, config)}"
