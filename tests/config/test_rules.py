"""The rule table: every row stops the run it should stop, and the override it advises lets it start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from config_support import FLAGS
from omegaconf import DictConfig, OmegaConf
from rule_cases import (
    ACTOR,
    BREAKING,
    BREAKING_FOR_THE_TRAINER,
    MODEL,
    REF,
    ROLLOUT,
    STOCK_ENGINE_CONFIG,
    WITH_CRITIC,
)
from transformers import AutoConfig

from verl_pg_plugin.config import Mode
from verl_pg_plugin.config.checkpoint_checks import roles_of
from verl_pg_plugin.config.facts import Facts
from verl_pg_plugin.config.rule import Rule
from verl_pg_plugin.config.rules import RULES
from verl_pg_plugin.config.validate import check, validate
from verl_pg_plugin.config.violation import ConfigError, Violation

CASES = [
    pytest.param(rule, mode, settings, id=f"{rule.name}-{mode.value}-{number}")
    for rule in RULES
    for mode in Mode
    for number, settings in enumerate([*BREAKING.get(rule.name, []), *BREAKING_FOR_THE_TRAINER.get(rule.name, [])])
]
OVERRIDE = re.compile(r"\+{0,2}([\w.]+)=([\w.]+)")


def names(violations) -> list[str]:
    return [violation.rule for violation in violations]


@pytest.fixture
def broken(make_config, folders, without):
    """A config in a mode with settings that break a rule; the critic's mode is the actor's."""

    def make(rule: Rule, mode: Mode, settings: dict[str, Any]) -> DictConfig:
        without(rule.name)
        critic = {"critic.model.use_remove_padding": FLAGS[mode][1]}
        settings = {key: folders.get(value, value) for key, value in {**critic, **settings}.items()}
        return make_config(mode, settings)

    return make


def violations_of(rule: Rule, config: DictConfig) -> list[Violation]:
    folders = {role: Path(OmegaConf.select(config, f"{role.model}.path")) for role in roles_of(config)}
    return list(
        rule.violations(
            Facts.from_hydra(config, role, AutoConfig.from_pretrained(folder)) for role, folder in folders.items()
        )
    )


def test_every_rule_has_a_breaking_case():
    assert {*BREAKING, *BREAKING_FOR_THE_TRAINER} == {rule.name for rule in RULES}


@pytest.mark.parametrize("mode", list(Mode))
def test_a_supported_run_is_not_stopped(make_config, mode):
    assert validate(make_config(mode)) == []
    assert validate(make_config(mode, WITH_CRITIC)) == []


@pytest.mark.parametrize(("rule", "mode", "settings"), CASES)
def test_rule_stops_the_run_in_its_modes_and_only_there(broken, rule, mode, settings):
    config = broken(rule, mode, settings)
    found = violations_of(rule, config)
    assert bool(found) == (mode in rule.modes)
    for violation in found:
        assert violation.settings
        for setting in violation.settings:
            assert setting.value == OmegaConf.select(config, setting.key)
            installs = violation.fix.startswith("pip install ")
            assert setting.key.split(".")[-1] in violation.fix or "rollout.n" in violation.why or installs


@pytest.mark.parametrize(
    ("rule", "mode", "settings"), [case for case in CASES if case.values[1] in case.values[0].modes]
)
def test_each_advised_fix_lets_the_run_pass_the_rule(broken, rule, mode, settings):
    (violation,) = violations_of(rule, broken(rule, mode, settings))
    for fix in violation.fix.split(", or "):
        if fix.startswith("pip install "):
            continue
        overrides = OVERRIDE.findall(fix)
        assert overrides, f"no override in {fix!r}"
        fixed = broken(rule, mode, settings)
        for key, value in overrides:
            OmegaConf.update(fixed, key, OmegaConf.from_dotlist([f"value={value}"]).value, force_add=True)
        assert violations_of(rule, fixed) == []


def test_all_limits_of_the_padded_mode_are_reported_in_one_error(make_config):
    settings = {
        "trainer.balance_batch": True,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{MODEL}.use_fused_kernels": True,
        f"{ACTOR}.ulysses_sequence_parallel_size": 2,
        f"{MODEL}.override_config.attn_implementation": "ring_flash_attention",
        f"{ACTOR}.use_remove_padding": True,
        f"{ACTOR}.strategy": "megatron",
        f"{ROLLOUT}.n": 5,
    }
    with pytest.raises(ConfigError) as caught:
        check(make_config(Mode.PADDED_GROUPS, settings))
    found = names(caught.value.violations)
    assert set(found) >= {
        "balance_batch",
        "dynamic_bsz",
        "fused_kernels",
        "ulysses",
        "attn_implementation",
        "remove_padding_per_role",
        "fsdp_strategy",
        "micro_batch_holds_groups",
    }
    message = str(caught.value)
    assert message.startswith(f"{len(found)} problems in the configuration, nothing was started:")
    assert "1. trainer.balance_batch=True" in message
    assert message.count("why: ") == message.count("fix: ") == len(found)


def test_a_setting_that_follows_another_is_not_reported_twice(make_config):
    (violation,) = [
        violation
        for violation in validate(make_config(Mode.PADDED_GROUPS, {f"{ACTOR}.use_dynamic_bsz": True}))
        if violation.rule == "dynamic_bsz"
    ]
    assert [str(setting) for setting in violation.settings] == [f"{ACTOR}.use_dynamic_bsz=True"]


def test_the_reference_policy_counts_only_when_there_is_one(make_config):
    settings = {f"{REF}.fsdp_config._target_": STOCK_ENGINE_CONFIG}
    assert names(validate(make_config(Mode.PACKED, settings))) == ["engine_config_target"]
    assert validate(make_config(Mode.PACKED, {**settings, f"{ACTOR}.use_kl_loss": False})) == []


def test_the_critic_counts_only_when_there_is_one(make_config):
    settings = {"critic.model.use_remove_padding": False}
    assert validate(make_config(Mode.PACKED, settings)) == []
    (violation,) = validate(make_config(Mode.PACKED, {**WITH_CRITIC, **settings}))
    assert violation.fix == "critic.model.use_remove_padding=True"


def test_micro_batch_fix_names_the_next_size_that_holds_whole_groups(make_config):
    config = make_config(Mode.PADDED_GROUPS, {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 6})
    (violation,) = [found for found in validate(config) if found.rule == "micro_batch_holds_groups"]
    assert f"{ACTOR}.ppo_micro_batch_size_per_gpu=8" in violation.fix


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer.balance_batch": True},
        {f"{ACTOR}.use_dynamic_bsz": True},
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3},
        {f"{ACTOR}.entropy_checkpointing": True, f"{ACTOR}.entropy_from_logits_with_chunking": True},
        {f"{ACTOR}.calculate_sum_pi_squared": True},
        {f"{ACTOR}.strategy": "fsdp2"},
        {"prefix_grouper.compile_layers": True, f"{ACTOR}.strategy": "fsdp2"},
        {
            "prefix_grouper.compile_layers": True,
            f"{ACTOR}.fsdp_config.use_orig_params": True,
            f"{REF}.fsdp_config.use_orig_params": True,
        },
        {f"{MODEL}.use_liger": True},
        {f"{MODEL}.lora_rank": 8},
        {f"{MODEL}.tiled_mlp.enabled": True},
        {f"{MODEL}.enable_activation_offload": True},
        {f"{MODEL}.override_config.attn_implementation": "sdpa"},
        WITH_CRITIC,
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_packed_mode_takes_what_it_supports(make_config, settings):
    assert validate(make_config(Mode.PACKED, settings)) == []


def test_a_critics_size_that_its_engine_is_told_too_is_taken(make_config):
    sizes = {"critic.ulysses_sequence_parallel_size": 2, "critic.fsdp.ulysses_sequence_parallel_size": 2}
    assert "critic_ulysses" not in names(validate(make_config(Mode.PACKED, {**WITH_CRITIC, **sizes})))
