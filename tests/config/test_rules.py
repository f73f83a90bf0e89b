"""The rule table: every row stops the run it should stop, and the override it advises lets it start."""

from __future__ import annotations

import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_pg_plugin.config import Mode, mode_of
from verl_pg_plugin.config.rules import RULES
from verl_pg_plugin.config.validate import check, validate
from verl_pg_plugin.config.violation import ConfigError

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
STOCK_ENGINE_CONFIG = "verl.workers.config.FSDPEngineConfig"
WITH_CRITIC = {"algorithm.adv_estimator": "gae", "critic.model.path": f"${{{MODEL}.path}}"}

# Settings that break the rule of that name in every mode in which it holds, one entry per way to break it.
BREAKING: dict[str, list[dict[str, Any]]] = {
    "balance_batch": [{"trainer.balance_batch": True}],
    "dynamic_bsz": [
        {f"{ACTOR}.use_dynamic_bsz": True},
        {f"{REF}.log_prob_use_dynamic_bsz": True},
        {f"{ROLLOUT}.log_prob_use_dynamic_bsz": True},
    ],
    "micro_batch_holds_groups": [
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 6},
        {f"{REF}.log_prob_micro_batch_size_per_gpu": 1},
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 9},
        {f"{ROLLOUT}.n": 5},
    ],
    "remove_padding_per_role": [{f"{ACTOR}.use_remove_padding": True, f"{REF}.use_remove_padding": False}],
    "fused_kernels": [
        {f"{MODEL}.use_fused_kernels": True},
        {f"{ACTOR}.use_fused_kernels": True},
    ],
    "ulysses": [
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2},
        {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2},
        {f"{REF}.ulysses_sequence_parallel_size": 4},
        {f"{REF}.fsdp_config.ulysses_sequence_parallel_size": 2},
    ],
    "ring_attention": [
        {f"{ACTOR}.megatron.context_parallel_size": 2},
        {f"{REF}.torchtitan.context_parallel_size": 2},
    ],
    "critic_ulysses": [{**WITH_CRITIC, "critic.ulysses_sequence_parallel_size": 2}],
    "attn_implementation": [
        {f"{MODEL}.override_config.attn_implementation": "ring_flash_attention"},
        {f"{MODEL}.override_config.attn_implementation": "flex_attention"},
    ],
    "fsdp_strategy": [
        {f"{ACTOR}.strategy": name}
        for name in ("megatron", "veomni", "torchtitan", "automodel", "mindspeed", "fsdp_turbo")
    ]
    + [{f"{REF}.strategy": "megatron"}, {**WITH_CRITIC, "critic.strategy": "megatron"}],
    "engine_config_target": [
        {f"{ACTOR}.fsdp_config._target_": STOCK_ENGINE_CONFIG},
        {f"{REF}.fsdp_config._target_": STOCK_ENGINE_CONFIG},
        {**WITH_CRITIC, "critic.fsdp._target_": STOCK_ENGINE_CONFIG},
    ],
    "engine_config_flag": [
        {f"{ACTOR}.fsdp_config.use_prefix_grouper": True, f"{REF}.fsdp_config.use_prefix_grouper": False}
    ],
    "v1_trainer": [{"trainer.use_v1": False}],
    "distillation": [{"distillation.enabled": True}],
    "multi_token_prediction": [{f"{MODEL}.mtp.enable": True}],
    "quantization_aware_training": [
        {f"{ACTOR}.qat.enable": True},
        {f"{ACTOR}.fsdp_config.qat.enable": True},
        {f"{REF}.fsdp_config.qat.enable": True},
    ],
    "pad_to_length": [{f"{ACTOR}.pad_to_length": True}, {f"{REF}.fsdp_config.pad_to_length": True}],
    "static_rows": [{"prefix_grouper.static_rows": True}],
    "compile_layers": [{"prefix_grouper.compile_layers": True}],
    "dedup_gate": [{"prefix_grouper.min_dedup_ratio": 1.5}],
    "static_rows_budget": [
        {"prefix_grouper.static_rows": True, f"{ACTOR}.use_dynamic_bsz": False},
        {"prefix_grouper.static_rows": True, f"{ROLLOUT}.log_prob_use_dynamic_bsz": False},
    ],
    "static_rows_fallback": [{"prefix_grouper.static_rows": True, "prefix_grouper.on_mismatch": "rmpad"}],
    "verify": [{"prefix_grouper.verify": "first"}, {"prefix_grouper.verify": "every_n"}],
    "verify_offload": [
        {"prefix_grouper.verify": "first", f"{MODEL}.enable_activation_offload": True},
        {**WITH_CRITIC, "prefix_grouper.verify": "first", "critic.model.enable_activation_offload": True},
    ],
    "compile_layers_fsdp1": [{"prefix_grouper.compile_layers": True, f"{ACTOR}.strategy": "fsdp"}],
    "compile_critic_layers_fsdp1": [
        {**WITH_CRITIC, "prefix_grouper.compile_layers": True, "critic.strategy": "fsdp"},
    ],
    "fused_kernels_backend": [
        {f"{MODEL}.use_fused_kernels": True, f"{MODEL}.fused_kernel_options.impl_backend": name}
        for name in ("cutlass", "triton", "liger")
    ],
    "fused_kernels_sum_pi_squared": [{f"{MODEL}.use_fused_kernels": True, f"{ACTOR}.calculate_sum_pi_squared": True}],
    "critic_padding": [{**WITH_CRITIC, "critic.model.use_remove_padding": False}],
}
CASES = [
    pytest.param(rule, mode, settings, id=f"{rule.name}-{mode.value}-{number}")
    for rule in RULES
    for mode in Mode
    for number, settings in enumerate(BREAKING.get(rule.name, []))
]
OVERRIDE = re.compile(r"\+{0,2}([\w.]+)=([\w.]+)")


def names(violations) -> list[str]:
    return [violation.rule for violation in violations]


def test_every_rule_has_a_breaking_case():
    assert set(BREAKING) == {rule.name for rule in RULES}


@pytest.mark.parametrize("mode", list(Mode))
def test_a_supported_run_is_not_stopped(make_config, mode):
    assert validate(make_config(mode)) == []
    assert validate(make_config(mode, WITH_CRITIC)) == []


@pytest.mark.parametrize(("rule", "mode", "settings"), CASES)
def test_rule_stops_the_run_in_its_modes_and_only_there(make_config, rule, mode, settings):
    config = make_config(mode, settings)
    violation = rule.violation(config, mode_of(config))
    if mode not in rule.modes:
        assert violation is None
        return
    assert violation is not None
    for setting in violation.settings:
        assert setting.value == OmegaConf.select(config, setting.key)
        assert setting.key.split(".")[-1] in violation.fix or "rollout.n" in violation.why


@pytest.mark.parametrize(
    ("rule", "mode", "settings"), [case for case in CASES if case.values[1] in case.values[0].modes]
)
def test_each_advised_fix_lets_the_run_pass_the_rule(make_config, rule, mode, settings):
    violation = rule.violation(make_config(mode, settings), mode)
    for fix in violation.fix.split(", or "):
        overrides = OVERRIDE.findall(fix)
        assert overrides, f"no override in {fix!r}"
        fixed = make_config(mode, settings)
        for key, value in overrides:
            OmegaConf.update(fixed, key, OmegaConf.from_dotlist([f"value={value}"]).value, force_add=True)
        assert rule.violation(fixed, mode_of(fixed)) is None


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
        check(make_config(Mode.PREFIX_GROUPER, settings))
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
        for violation in validate(make_config(Mode.PREFIX_GROUPER, {f"{ACTOR}.use_dynamic_bsz": True}))
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
    config = make_config(Mode.PREFIX_GROUPER, {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 6})
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
