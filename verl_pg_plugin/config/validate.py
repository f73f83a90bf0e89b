"""Everything that can be known to fail before a process or a GPU is claimed, reported at once."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.checkpoint_checks import checkpoint_violations, roles_of
from verl_pg_plugin.config.facts import Facts
from verl_pg_plugin.config.keys import OPTIONS, USE_PREFIX_GROUPER, USE_REMOVE_PADDING
from verl_pg_plugin.config.options import not_boolean, option_violations
from verl_pg_plugin.config.rule import violations
from verl_pg_plugin.config.rules import RULES
from verl_pg_plugin.config.violation import ConfigError, Setting, Violation

__all__ = ["check", "validate"]


def validate(config: DictConfig) -> list[Violation]:
    """Every reason why ``config`` cannot run, empty when it can.

    Args:
        config: the composed trainer config, verl's ``ppo_trainer`` or this plugin's ``pg_ppo_trainer``.

    Raises:
        omegaconf.errors.OmegaConfBaseException: when an interpolation cannot be resolved.
    """
    engines = [Facts.from_hydra(config, role) for role in roles_of(config)]
    return [*_values(config), *violations(RULES, engines), *checkpoint_violations(config)]


def check(config: DictConfig) -> None:
    """Pass, or raise one error that lists all violations.

    Raises:
        ConfigError: when :func:`validate` finds anything.
    """
    violations = validate(config)
    if violations:
        raise ConfigError(violations)


def _values(config: DictConfig) -> Iterator[Violation]:
    """The two flags and the options that are not what they seem: Hydra reads ``no`` as a word, and a word is true."""
    for key in (USE_PREFIX_GROUPER, USE_REMOVE_PADDING):
        flag = OmegaConf.select(config, key)
        if flag is not None and (objection := not_boolean(flag)):
            why, value = objection
            yield Violation("flag_value", (Setting(key, flag),), why, f"{key}={value}")
    section = OmegaConf.select(config, OPTIONS)
    if isinstance(section, DictConfig):
        yield from option_violations({str(name): OmegaConf.select(section, str(name)) for name in section})
