"""Values of a composed config as what they are meant to be, or None: a wrong one is another check's to report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_pg_plugin.config.facts import read_setting
from verl_pg_plugin.config.violation import Violation

__all__ = ["count", "is_remote", "without_followers", "words", "wrong"]


def count(config: DictConfig, key: str) -> int | None:
    """A positive integer, else None."""
    value = OmegaConf.select(config, key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def words(config: DictConfig, key: str) -> list[str]:
    """One word or a list of them, as a list; empty where there is none."""
    value = OmegaConf.select(config, key)
    if isinstance(value, (list, ListConfig)):
        return [str(entry) for entry in value]
    return [] if value is None else [str(value)]


def is_remote(path: str) -> bool:
    """Whether a path leads to another machine (hdfs://, s3://): it is downloaded when the run needs it."""
    return "://" in path and not Path(path).exists()


def wrong(config: DictConfig, rule: str, keys: str | tuple[str, ...], why: str, fix: str) -> Violation:
    """A violation of the entries at ``keys``, the first being the one to change."""
    keys = (keys,) if isinstance(keys, str) else keys
    return Violation(rule, tuple(read_setting(config, key) for key in keys), why, fix)


def without_followers(violations: Iterable[Violation]) -> list[Violation]:
    """Those whose first setting is no interpolation of another one's: to change that one changes them."""
    found = list(violations)
    keys = {violation.settings[0].key for violation in found}
    return [violation for violation in found if not any(key in violation.settings[0].follows for key in keys)]
