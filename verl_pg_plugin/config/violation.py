"""What a validator reports: the overrides at fault, why, and what to set instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EXIT_USER_ERROR = 2
"""Exit code of a process that started nothing because of its settings."""


@dataclass(frozen=True)
class Setting:
    """One config entry as the user would write it on the command line.

    Attributes:
        follows: the interpolation that the value was taken from, empty for a value of its own.
    """

    key: str
    value: Any
    follows: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class Violation:
    """One reason why a run cannot start.

    Args:
        rule: name of the rule, stable across versions.
        settings: the offending entries with their current values, the one to change first; empty where somebody else
            objects and does not say.
        why: cause in one sentence, without a final full stop.
        fix: override or command that removes the violation.
    """

    rule: str
    settings: tuple[Setting, ...]
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.settings_and_values}\n   why: {self.why}\n   fix: {self.fix}"

    @property
    def settings_and_values(self) -> str:
        """As on the command line; for an objection of somebody else's, which names none, that it is one."""
        return ", ".join(map(str, self.settings)) or "(settings that the message names)"


class ConfigError(ValueError):
    """A run that cannot start as configured; ``violations`` holds every reason found."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = tuple(violations)
        count = f"{len(violations)} problem{'s' if len(violations) != 1 else ''} in the configuration"
        listing = "\n".join(f"{number}. {violation}" for number, violation in enumerate(violations, start=1))
        super().__init__(f"{count}, nothing was started:\n{listing}")
