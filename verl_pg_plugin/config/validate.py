"""Everything that can be known to fail before a process or a GPU is claimed, reported at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.before_ray.budgets import budget_violations
from verl_pg_plugin.config.before_ray.data import data_violations
from verl_pg_plugin.config.before_ray.files import file_violations
from verl_pg_plugin.config.before_ray.hub import hub_violations
from verl_pg_plugin.config.before_ray.machines import machine_violations, runs_elsewhere
from verl_pg_plugin.config.before_ray.prompts import prompt_violations
from verl_pg_plugin.config.before_ray.rollout import rollout_violations
from verl_pg_plugin.config.before_ray.values import value_violations
from verl_pg_plugin.config.before_ray.verls_own import verls_objection
from verl_pg_plugin.config.checkpoint_checks import checkpoint_violations, roles_of
from verl_pg_plugin.config.facts import Facts
from verl_pg_plugin.config.keys import OPTIONS, USE_PREFIX_GROUPER, USE_REMOVE_PADDING
from verl_pg_plugin.config.options import not_boolean, option_violations
from verl_pg_plugin.config.rule import violations
from verl_pg_plugin.config.rules import RULES
from verl_pg_plugin.config.violation import ConfigError, Setting, Violation

__all__ = ["check", "everything", "validate"]


def everything(config: DictConfig) -> list[Violation]:
    """All that can be known against a run before Ray starts, each thing once.

    Beside the rules of the modes (``validate``) that is what the run would trip over in a worker, minutes later,
    and what verl's own validation raises: it stops at its first, which is left out where it names a setting that is
    listed already.

    Raises:
        omegaconf.errors.OmegaConfBaseException: when an interpolation cannot be resolved.
    """
    found: list[Violation] = []
    said: set[str] = set()
    for look in LOOKS if runs_elsewhere(config) else (*LOOKS, *LOOKS_AT_THIS_MACHINE):
        found += [violation for violation in look(config) if violation.settings[0].key not in said]
        said |= {setting.key for violation in found for setting in violation.settings}
    return [*found, *verls_objection(config, said)]


def validate(config: DictConfig) -> list[Violation]:
    """Every reason why ``config`` cannot run, empty when it can.

    Args:
        config: the composed trainer config, verl's ``ppo_trainer`` or this plugin's ``pg_ppo_trainer``.

    Raises:
        omegaconf.errors.OmegaConfBaseException: when an interpolation cannot be resolved.
    """
    engines = [Facts.from_hydra(config, role) for role in roles_of(config)]
    return [*_flags_and_options(config), *violations(RULES, engines), *checkpoint_violations(config)]


def check(config: DictConfig) -> None:
    """Pass, or raise one error that lists all violations.

    Raises:
        ConfigError: when ``everything`` finds anything.
    """
    if found := everything(config):
        raise ConfigError(found)


def _flags_and_options(config: DictConfig) -> Iterator[Violation]:
    """The two flags and the options that are not what they seem: Hydra reads ``no`` as a word, and a word is true."""
    for key in (USE_PREFIX_GROUPER, USE_REMOVE_PADDING):
        flag = OmegaConf.select(config, key)
        if flag is not None and (objection := not_boolean(flag)):
            why, value = objection
            yield Violation("flag_value", (Setting(key, flag),), why, f"{key}={value}")
    section = OmegaConf.select(config, OPTIONS)
    if isinstance(section, DictConfig):
        yield from option_violations({str(name): OmegaConf.select(section, str(name)) for name in section})


LOOKS: tuple[Callable[[DictConfig], Iterable[Violation]], ...] = (
    validate,
    value_violations,
    machine_violations,
    budget_violations,
)
"""In the order in which their violations are listed; a setting that one has named is not named by a later one."""
LOOKS_AT_THIS_MACHINE: tuple[Callable[[DictConfig], Iterable[Violation]], ...] = (
    rollout_violations,
    file_violations,
    data_violations,
    prompt_violations,
    hub_violations,
)
"""Left out where the run is sent to a cluster, whose machines have what they have."""
