"""Whom a rule is asked about, and what offends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl_pg_plugin.config.facts import Facts, Role
from verl_pg_plugin.config.mode import Mode
from verl_pg_plugin.config.rule import PACKED, Rule, above_one, is_off, is_on, is_verifying, set_to
from verl_pg_plugin.config.violation import Setting

SETTING = Setting("prefix_grouper.verify", "first")
FACTS = Facts(Role.ACTOR, Mode.PACKED, "cpu", {"verify": (SETTING,)}, {"verify": "first"}, hf_config=object())
RULE = Rule("some", PACKED, ("verify",), is_verifying, "it is", set_to("off"), roles=frozenset({Role.ACTOR}))


def test_a_rule_is_asked_about_its_modes_and_roles_alone() -> None:
    (violation,) = RULE.violations([FACTS])
    assert violation.fix == "++prefix_grouper.verify=off"
    assert not list(RULE.violations([replace(FACTS, role=Role.CRITIC)]))
    assert not list(RULE.violations([replace(FACTS, mode=Mode.RMPAD)]))


def test_a_rule_that_needs_the_model_waits_for_it() -> None:
    needs = replace(RULE, needs_model=True)
    assert list(needs.violations([FACTS]))
    assert not list(needs.violations([replace(FACTS, hf_config=None)]))
    assert list(RULE.violations([replace(FACTS, hf_config=None)]))


@pytest.mark.parametrize(
    ("offends", "wrong", "right"),
    [
        (above_one, [2, 1.5], [1, 0, None, "two"]),
        (is_verifying, ["first", "every_n"], ["off", None, False]),
        (is_on, [True, "yes"], [False, None, "no"]),
        (is_off, [False, "no"], [True, None]),
    ],
)
def test_values_offend_or_do_not(offends, wrong: list, right: list) -> None:
    assert all(offends(value, FACTS) for value in wrong)
    assert not any(offends(value, FACTS) for value in right)
