"""Everything that can be known to fail before a process or a GPU is claimed, reported at once."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from verl.utils.device import get_device_name

from verl_pg_plugin.attention.kernels.specs import ATTENTION_KERNEL
from verl_pg_plugin.config.attention_kernel import attention_kernel_violation
from verl_pg_plugin.config.checkpoint_checks import checkpoint_violations
from verl_pg_plugin.config.mode import mode_of
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
    mode = mode_of(config)
    found = [rule.violation(config, mode) for rule in RULES]
    if mode.shares_prefixes:
        kernel = Setting(ATTENTION_KERNEL, OmegaConf.select(config, ATTENTION_KERNEL, default="auto"))
        found.append(attention_kernel_violation(kernel, get_device_name()))
    return [violation for violation in found if violation is not None] + checkpoint_violations(config)


def check(config: DictConfig) -> None:
    """Pass, or raise one error that lists all violations.

    Raises:
        ConfigError: when :func:`validate` finds anything.
    """
    violations = validate(config)
    if violations:
        raise ConfigError(violations)
