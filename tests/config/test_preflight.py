"""Configs that work pass; configs certain to fail are listed at once, with key, cause and fix."""

import importlib

import pytest
from omegaconf import DictConfig

from tests.config.config_support import CRITIC, SHARED
from verl_pg_plugin import compat
from verl_pg_plugin.config import Mode, preflight
from verl_pg_plugin.config.engage import engage
from verl_pg_plugin.config.keys import ACTOR, MODEL, REF, ROLLOUT
from verl_pg_plugin.config.preflight import check
from verl_pg_plugin.issue import ConfigError, Issue

SP = f"{ACTOR}.ulysses_sequence_parallel_size"
MINI = f"{ACTOR}.ppo_mini_batch_size"
BUDGET = f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu"
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async data.train_batch_size=1024 trainer.n_gpus_per_node=4 "
    f"{ROLLOUT}.checkpoint_engine.backend=nccl {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=4 "
)

WORKING: dict[str, str] = {
    "hsdp_on_two_nodes": f"{ACTOR}.fsdp_config.fsdp_size=4 {REF}.fsdp_config.fsdp_size=4 "
    "trainer.nnodes=2 trainer.n_gpus_per_node=16",
    "the_ignored_ulysses_of_the_critic": f"{CRITIC} {ROLLOUT}.n=1 "
    "critic.ulysses_sequence_parallel_size=2 critic.use_dynamic_bsz=True",
    "sp2": f"{ACTOR}.ulysses_sequence_parallel_size=2 {REF}.ulysses_sequence_parallel_size=2",
    "fsdp2_offload": f"{ACTOR}.strategy=fsdp2 {REF}.strategy=fsdp2 {ACTOR}.fsdp_config.offload_policy=True",
    "separate_async": SEPARATE,
    "budget_below_the_longest_possible_sequence": f"{ACTOR}.ppo_max_token_len_per_gpu=1200",
    "numbers_for_booleans": f"trainer.balance_batch=1 {ACTOR}.use_kl_loss=1 {MODEL}.use_remove_padding=1",
    "floats_for_counts": f"{ACTOR}.ppo_max_token_len_per_gpu=24576.0",
    "a_loss_and_an_estimator_of_the_users": f"{MODEL}.external_lib=my_lib algorithm.adv_estimator=mine "
    f"{ACTOR}.policy_loss.loss_mode=mine",
    "a_rollout_engine_of_a_plugin": f"{ROLLOUT}.name=mine",
    "a_model_on_hdfs": f"{MODEL}.path=hdfs://cluster/model",
    "a_class_of_the_checkpoints_own": f"{MODEL}.path={{own}} {MODEL}.trust_remote_code=True",
    "an_architecture_of_an_external_lib": f"{MODEL}.path={{own}} {MODEL}.external_lib=my_lib",
    "fully_async_streams": "data.train_batch_size=0 async_training.require_batches=4",
    "a_flag_that_verls_engine_does_not_read": f"{ACTOR}.qat.enable=True",
    "eager_attention_is_replaced": f"{MODEL}.override_config.attn_implementation=eager",
    "a_role_with_a_padding_flag_of_its_own": f"{ACTOR}.use_remove_padding=False",
    "heads_that_draft_rollouts": f"{MODEL}.mtp.enable=True {MODEL}.mtp.enable_rollout=True",
    "liger_without_its_package": f"{MODEL}.use_fused_kernels=True {MODEL}.fused_kernel_options.impl_backend=liger",
    "compiled": f"prefix_grouper.compile_layers=True {ACTOR}.strategy=fsdp2 {REF}.strategy=fsdp2",
    "a_critic_cut_by_sequences_in_its_engine_config": CRITIC.replace("gpu=8", "gpu=null")
    + "++critic.fsdp.use_dynamic_bsz=False ++critic.fsdp.micro_batch_size_per_gpu=8 critic.use_dynamic_bsz=True "
    "++critic.fsdp.infer_micro_batch_size_per_gpu=8",
    "a_reference_policy_that_is_the_actor_without_its_adapter": f"{MODEL}.lora_rank=8 {ACTOR}.strategy=fsdp2 "
    f"{ACTOR}.use_kl_loss=True {REF}.ulysses_sequence_parallel_size=3",
    "padded_groups_verified": f"{MODEL}.use_remove_padding=False {ACTOR}.use_dynamic_bsz=False "
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=False {REF}.log_prob_use_dynamic_bsz=False prefix_grouper.verify=first",
    "everything_of_ours": "prefix_grouper.activations=inputs prefix_grouper.prefix_cache=off "
    "prefix_grouper.verify=every_50 prefix_grouper.logits_chunk_size=0 prefix_grouper.verify_tolerance=0.01",
}


def errors(config: DictConfig) -> list[Issue]:
    return [issue for issue in preflight.preflight(config) if not issue.is_warning]


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", WORKING)
def test_configs_that_stock_verl_trains_are_accepted(name: str, config_of) -> None:
    assert errors(config_of(WORKING[name], **SHARED)) == []


TOP_K = "distillation.enabled=True distillation.distillation_loss.loss_mode=forward_kl_topk"
REFUSED: list[tuple[str, str, str]] = [
    # overrides, the last of which is named; part of the cause; part of the fix
    # Three divides six, but heads cannot be spread over three ranks.
    (f"trainer.n_gpus_per_node=6 {SP}=4", "tokens do not divide the run's 6", f"{SP}=2"),
    (f"{SP}=3", "cannot be spread", f"{SP}=1"),  # once: the reference policy follows this key in verl's config
    (f"{MODEL}.use_remove_padding=packed", "is not a boolean", ""),
    *((f"prefix_grouper={value}", "is not a section of options", "") for value in ("fast", "null")),
    (f"{MODEL}.use_fused_kernels=True {ACTOR}.calculate_sum_pi_squared=True", "compute the probabilities", "=False"),
    (f"{TOP_K} {MODEL}.use_fused_kernels=True", "do not compute the logits that", "=False"),
    ("prefix_grouper.attention_kernel=flash_attn_2", "needs a cuda device", "=auto"),
    (f"{MODEL}.use_remove_padding=False {ACTOR}.use_dynamic_bsz=True", "cut groups by token", "packed mode"),
    (f"{MODEL}.use_remove_padding=False {REF}.log_prob_use_dynamic_bsz=True", "cut groups by token", "packed mode"),
    (f"{ACTOR}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig", "verl ignores", "++"),
    (f"{REF}.fsdp_config.use_prefix_grouper=False", "must equal", "=True"),
    (f"{REF}.strategy=fsdp {ACTOR}.strategy=megatron", "FSDP and VeOmni", "model_engine=dp"),
    (f"{ACTOR}.fsdp_config.prefix_grouper=null", "would ignore prefix_grouper", "=${prefix_grouper}'"),
]


@pytest.mark.parametrize(("overrides", "why", "fix"), REFUSED, ids=[row[0][:60] for row in REFUSED])
def test_failing_configs_are_one_error_with_key_cause_and_fix(overrides, why, fix, config_of) -> None:
    (issue,) = errors(config_of(overrides))
    last = overrides.split()[-1].lstrip("+")
    assert issue.key == last.partition("=")[0]
    assert issue.setting.lstrip("+").startswith(last.partition("{")[0].rstrip("[").replace("null", "None"))
    assert why in issue.why
    assert fix in issue.fix


def test_invalid_counts_are_left_to_verl(config_of) -> None:
    counts = f"trainer.nnodes=two {ROLLOUT}.n=null {MINI}=-8 {SP}=0 {BUDGET}=8k data.max_response_length=long"
    assert preflight.preflight(config_of(f"{counts} {MODEL}.lora_rank=word {CRITIC}")) == []


def test_untested_versions_are_one_log_line(config_of, monkeypatch, caplog) -> None:
    monkeypatch.setattr(compat, "untested", lambda: ["verl 0.10.0 is outside of what was tested, <0.10"])
    check(config_of())
    (record,) = (record for record in caplog.records if "outside of what was tested" in record.message)
    assert "\n" not in record.message


def test_inherited_settings_and_uneven_mini_batches_are_refused(config_of) -> None:
    engines = " ".join(f"{role}.fsdp_config.pad_to_length=False" for role in (ACTOR, REF))  # the actor's key wins
    issues = errors(config_of(f"{MODEL}.use_remove_padding=False {ACTOR}.pad_to_length=True {engines}"))
    assert any("padded to the longest group" in issue.why for issue in issues)
    n = "actor_rollout_ref.rollout.n"
    uneven = f"trainer.n_gpus_per_node=8 {n}=5 {MINI}=12 data.train_batch_size=48"
    assert errors(config_of(f"{uneven} trainer.val_only=True")) == [], "nothing is updated"
    (issue,) = errors(config_of(uneven))
    assert issue.why == f"12 prompts x {n}=5 sequences do not divide into 8 data-parallel ranks"
    assert issue.fix == f"{MINI}=16"
    assert not errors(config_of(f"trainer.n_gpus_per_node=8 {n}=5 {issue.fix} data.train_batch_size=48"))


BY_CUT = [f"{ACTOR}.policy_loss.loss_mode={mode}" for mode in ("geo_mean", "clip_cov", "kl_cov")]
BYPASS, CORRECTION = f"{ACTOR}.policy_loss.loss_mode=bypass_mode", f"{ACTOR}.policy_loss.rollout_correction"
OF_TRAINER = f"+{CORRECTION}=${{{{algorithm.rollout_correction}}}} algorithm.rollout_correction"
BY_CUT += [
    f"{BYPASS} +{CORRECTION}.loss_type=reinforce +{CORRECTION}.rollout_is_batch_normalize=True",
    f"{BYPASS} {OF_TRAINER}.loss_type=reinforce algorithm.rollout_correction.rollout_is_batch_normalize=True",
]


CASES = [(BY_CUT[0], Mode.PADDED_GROUPS), *((overrides, Mode.PACKED) for overrides in BY_CUT)]


@pytest.mark.parametrize(("overrides", "mode"), CASES)
def test_losses_over_single_micro_batches_are_warned_of(overrides: str, mode: Mode, config_of) -> None:
    (issue,) = (issue for issue in preflight.preflight(config_of(overrides, mode)) if issue.is_warning)
    assert issue.setting == overrides.split()[-1].lstrip("+")
    assert "depends on micro-batch boundaries" in issue.why
    assert "=False" in issue.fix


def test_weights_that_verl_normalizes_over_a_batch_or_does_not_apply_pass(config_of) -> None:
    for overrides in (BY_CUT[-1].replace("=reinforce", "=ppo_clip"), BY_CUT[-1].removeprefix(BYPASS)):
        assert preflight.preflight(config_of(overrides)) == []


def test_warnings_are_logged_and_do_not_stop_the_run(config_of, caplog) -> None:
    offload = f"{MODEL}.enable_activation_offload=True {MODEL}.enable_gradient_checkpointing=False"
    by_cut = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm data.max_response_length=77"
    check(config_of(f"{offload} {MODEL}.override_config.attn_implementation=eager {BUDGET}=64.0 {by_cut}"))
    assert f". Fix: {ACTOR}.loss_scale_factor=77" in caplog.text
    assert "holds 64 tokens, and a longer sequence (up to" in caplog.text
    check(config_of(f"{MODEL}.enable_gradient_checkpointing=False prefix_grouper.activations=inputs_on_host"))
    assert "++prefix_grouper.activations=inputs_on_host: without gradient checkpointing" in caplog.text
    of_critic = f"{CRITIC} data.max_prompt_length=40000"  # verl's V1 files lack this key
    assert preflight.preflight(config_of(f"{of_critic} ++critic.ppo_infer_max_token_len_per_gpu=1e5")) == []
    check(config_of(of_critic))
    assert ". Fix: ++critic.ppo_infer_max_token_len_per_gpu=40511" in caplog.text
    check(config_of(f"trainer.n_gpus_per_node=8 data.train_batch_size=6 {MINI}=2 {ACTOR}.shuffle=True"))
    assert f"{MINI}=2: fewer groups than the 8 data-parallel ranks" in caplog.text
    assert f". Fix: {MINI}=8 data.train_batch_size=8" in caplog.text
    assert f"mini-batches get sequences, not groups. Fix: {ACTOR}.shuffle=False" in caplog.text
    check(config_of(f"{CRITIC} data.train_batch_size=0 async_training.require_batches=2 critic.shuffle=True"))
    assert "mini-batches get sequences, not groups. Fix: critic.shuffle=False" in caplog.text
    check(config_of("prefix_grouper.prefix_cache=off", Mode.RMPAD))
    assert f"++prefix_grouper have no effect. Fix: {ACTOR}.use_prefix_grouper=True" in caplog.text
    assert "attention over shared prefixes replaces it" in caplog.text
    assert "nothing is offloaded" in caplog.text


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("+prefix_groupr.verify=first", "++prefix_grouper.<option>=<value>"),
        ("+prefix_caching=off", "++prefix_grouper.prefix_cache=<value>"),
        ("+use_prefix_grouper=True", f"{ACTOR}.use_prefix_grouper=True"),
        (f"+{ACTOR}.use_prefix_grouping=True", f"{ACTOR}.use_prefix_grouper=True"),
    ],
)
def test_keys_that_look_like_ours_get_a_hint(override: str, fix: str, config_of, caplog) -> None:
    for mode in (Mode.PACKED, Mode.RMPAD):
        caplog.clear()
        engage(config_of(override, mode))
        assert f"this plugin does not read it. Fix: did you mean {fix}?" in caplog.text


def test_missing_kernels_may_be_on_a_cluster_but_engines_must_import(config_of, monkeypatch) -> None:
    elsewhere = "prefix_grouper.attention_kernel=flash_attn_4 "
    assert len(errors(config_of(elsewhere))) == 1
    (issue,) = preflight.preflight(config_of(elsewhere + "ray_kwargs.ray_init.address=auto"))
    assert issue.is_warning
    monkeypatch.setattr(preflight, "registrations", [lambda: importlib.import_module("no_such_module")])
    with pytest.raises(ConfigError, match=r"not registered \(ModuleNotFoundError: No module named 'no_such_module'"):
        check(config_of())
    check(config_of(mode=Mode.RMPAD))
