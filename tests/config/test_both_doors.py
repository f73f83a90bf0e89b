"""verl's own entry point refuses what ours refuses, with the same words: every rule through both doors."""

from __future__ import annotations

from typing import Any

import pytest
from config_support import FLAGS
from engine_door import engine_configs
from omegaconf import DictConfig
from rule_cases import BREAKING, BREAKING_FOR_THE_TRAINER, WITH_CRITIC

from verl_pg_plugin.config import Mode
from verl_pg_plugin.config.checkpoint_checks import roles_of
from verl_pg_plugin.config.facts import SOURCES, Facts, Role
from verl_pg_plugin.config.rule import Rule, violations
from verl_pg_plugin.config.rules import RULES
from verl_pg_plugin.config.validate import validate
from verl_pg_plugin.config.violation import Violation
from verl_pg_plugin.engine.requirements import check_options

SHARED = [rule for rule in RULES if not rule.trainer_only]
BOTH = [
    pytest.param(rule, mode, settings, id=f"{rule.name}-{mode.value}-{number}")
    for rule in SHARED
    for mode in rule.modes
    for number, settings in enumerate(BREAKING[rule.name])
]


@pytest.fixture
def broken(make_config, folders, without):
    def make(rule: Rule, mode: Mode, settings: dict[str, Any]) -> DictConfig:
        without(rule.name)
        critic = {"critic.model.use_remove_padding": FLAGS[mode][1]}
        settings = {key: folders.get(value, value) for key, value in {**critic, **settings}.items()}
        return make_config(mode, settings)

    return make


def said_by_engines(config: DictConfig) -> list[Violation]:
    engines = [Facts.from_engine(*engine_configs(config, role)) for role in roles_of(config)]
    return [violation for engine in engines for violation in violations(RULES, [engine])]


def words(found: list[Violation]) -> set[tuple[str, str]]:
    return {(violation.rule, violation.why) for violation in found}


def test_a_rule_without_a_case_is_noticed():
    """Every rule is driven through both doors, or says why an engine cannot know."""
    assert set(BREAKING) == {rule.name for rule in SHARED}
    assert set(BREAKING_FOR_THE_TRAINER) >= {rule.name for rule in RULES if rule.trainer_only}
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(("rule", "mode", "settings"), BOTH)
def test_the_engine_says_what_the_validators_say(broken, rule, mode, settings):
    config = broken(rule, mode, settings)
    all_before_ray, all_in_worker = validate(config), said_by_engines(config)
    assert words(all_in_worker) <= words(all_before_ray), "an engine refuses nothing else"
    before_ray = [violation for violation in all_before_ray if violation.rule == rule.name]
    in_worker = [violation for violation in all_in_worker if violation.rule == rule.name]
    assert before_ray
    assert words(before_ray) == words(in_worker)
    known = {key for source in SOURCES.values() if source.engine for role in Role for key in source.keys_of(role)}
    for violation in in_worker:
        assert {setting.key for setting in violation.settings} <= known, "keys that a user can type"
        assert {setting.value for setting in violation.settings} <= {
            setting.value for before in before_ray for setting in before.settings
        }


@pytest.mark.parametrize("mode", [Mode.PADDED_GROUPS, Mode.PACKED])
def test_a_supported_run_gets_past_the_engines(make_config, mode):
    config = make_config(mode, WITH_CRITIC)
    assert list(roles_of(config)) == list(Role)
    for role in Role:
        check_options(*engine_configs(config, role))


def test_padded_groups_with_sequence_parallelism_are_refused_by_the_engine_by_a_key_of_its_role(make_config):
    key = "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size"
    config = make_config(Mode.PADDED_GROUPS, {key: 2})
    check_options(*engine_configs(config, Role.ACTOR))
    with pytest.raises(ValueError, match=rf"{key}=2: sequence parallelism would cut padded groups.*{key}=1"):
        check_options(*engine_configs(config, Role.REF))
