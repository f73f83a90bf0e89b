"""One row of the rule table: which facts it looks at, what offends, and how the user fixes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_pg_plugin.config.facts import SOURCES, Facts, Role
from verl_pg_plugin.config.keys import OPTIONS, USE_REMOVE_PADDING
from verl_pg_plugin.config.mode import Mode, is_set
from verl_pg_plugin.config.violation import Setting, Violation

__all__ = [
    "ALL",
    "PACKED",
    "PADDED_GROUPS",
    "SHARING",
    "Fix",
    "Offends",
    "Rule",
    "above_one",
    "add_as",
    "is_off",
    "is_on",
    "is_verifying",
    "packed_or",
    "set_to",
    "violations",
]

ALL = frozenset(Mode)
PADDED_GROUPS = frozenset({Mode.PADDED_GROUPS})
PACKED = frozenset({Mode.PACKED})
SHARING = PADDED_GROUPS | PACKED

Offends = Callable[[Any, Facts], bool]
Fix = Callable[[tuple[Setting, ...], Facts], str]


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Args:
        name: stable name, shown nowhere but in tests and ``Violation.rule``.
        modes: modes in which the rule holds.
        facts: names of ``facts.SOURCES``; each entry that holds one of them is looked at.
        offends: whether the value of such an entry (None when absent, of any type) breaks the rule.
        why: cause in one sentence, without a final full stop; or makes it from the value and the facts.
        fix: builds the override that fixes it from the offending settings.
        roles: whose engines it holds for.
        needs_model: whether it asks for the model's own config, which a hub id does not tell before a download.
        trainer_only: why an engine cannot know, for the rules that only the validators can ask; else empty.
    """

    name: str
    modes: frozenset[Mode]
    facts: tuple[str, ...]
    offends: Offends
    why: str | Callable[[Any, Facts], str]
    fix: Fix
    roles: frozenset[Role] = frozenset(Role)
    needs_model: bool = False
    trainer_only: str = ""

    def __post_init__(self) -> None:
        in_engine = any(SOURCES[fact].engine for fact in self.facts)
        assert in_engine == (not self.trainer_only), f"{self.name}: say why engines cannot know, or leave it out"

    def holds_for(self, facts: Facts) -> bool:
        """Whether the rule has anything to say about such an engine."""
        known = facts.hf_config is not None or not self.needs_model
        return facts.mode in self.modes and facts.role in self.roles and known

    def violations(self, engines: Iterable[Facts]) -> Iterator[Violation]:
        """The rule's violation in a run's engines: one for each cause, with the settings of all of them."""
        found: dict[str, tuple[Facts, dict[str, Setting]]] = {}
        for facts in filter(self.holds_for, engines):
            for setting in (setting for fact in self.facts for setting in facts.settings.get(fact, ())):
                if self.offends(setting.value, facts):
                    why = self.why if isinstance(self.why, str) else self.why(setting.value, facts)
                    found.setdefault(why, (facts, {}))[1].setdefault(setting.key, setting)
        for why, (facts, settings) in found.items():
            leading = _without_followers(settings)
            yield Violation(self.name, leading, why, self.fix(leading, facts))


def violations(rules: Iterable[Rule], engines: Sequence[Facts]) -> list[Violation]:
    """Every violation of the rules in a run's engines."""
    return [violation for rule in rules for violation in rule.violations(engines)]


def _without_followers(settings: dict[str, Setting]) -> tuple[Setting, ...]:
    """Drop settings that interpolate another offending one: fixing that one fixes them."""
    return tuple(
        setting
        for setting in settings.values()
        if not any(key in setting.follows for key in settings if key != setting.key)
    )


# What offends: (value, facts) -> does it break the rule


def is_on(value: Any, facts: Facts) -> bool:
    return is_set(value)


def is_off(value: Any, facts: Facts) -> bool:
    return value is not None and not is_set(value)


def above_one(value: Any, facts: Facts) -> bool:
    return isinstance(value, (int, float)) and value > 1


def is_verifying(value: Any, facts: Facts) -> bool:
    return value not in (None, "off", False)  # YAML reads a bare off as False


# Fixes: (offending settings, facts) -> override


def set_to(value: str) -> Fix:
    """As an override that any entry point takes: verl's own config has no section of ours, to which ``++`` adds."""
    return lambda settings, facts: " ".join(
        f"{'++' if setting.key.startswith(f'{OPTIONS}.') else ''}{setting.key}={value}" for setting in settings
    )


def add_as(value: str) -> Fix:
    return lambda settings, facts: " ".join(f"++{setting.key}={value}" for setting in settings)


def packed_or(fix: Fix) -> Fix:
    packed = f"{USE_REMOVE_PADDING}=True (selects packed mode, which supports it)"
    return lambda settings, facts: (
        f"{packed.replace('actor_rollout_ref.model', facts.role.model)}, or " + fix(settings, facts)
    )
