"""What works passes, however unusual; what is certain to fail is listed at once, with its key, its cause and a fix."""

import pytest
from omegaconf import DictConfig

from tests.config.config_support import CRITIC, SHARED
from verl_pg_plugin import compat
from verl_pg_plugin.config import Mode, preflight
from verl_pg_plugin.config.keys import ACTOR, MODEL, REF, ROLLOUT
from verl_pg_plugin.config.preflight import check
from verl_pg_plugin.issue import Issue

SP = f"{ACTOR}.ulysses_sequence_parallel_size"
MINI, MICRO = f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_micro_batch_size"
FEW = "trainer.n_gpus_per_node=8 ray_kwargs.ray_init.num_gpus=8 data.train_batch_size=6"
BUDGET = f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu"
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async data.train_batch_size=1024 trainer.n_gpus_per_node=4 "
    f"{ROLLOUT}.checkpoint_engine.backend=nccl {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=4 "
)
V0, ODD = "trainer.use_v1=False", f"{MINI}=8 data.train_batch_size=12"
REWARD_POOL = "reward.reward_model={{enable_resource_pool:True,nnodes:1,n_gpus_per_node:4}} trainer.n_gpus_per_node=4"

WORKING: dict[str, str] = {
    "hsdp": f"{ACTOR}.fsdp_config.fsdp_size=4 {REF}.fsdp_config.fsdp_size=4",
    "several_files": "data.train_files=[{data},{data}] data.val_files=[{data},{data}]",
    "the_ignored_ulysses_of_the_critic": f"{CRITIC} {ROLLOUT}.n=1 "
    "critic.ulysses_sequence_parallel_size=2 critic.use_dynamic_bsz=True",
    "sp2": f"{ACTOR}.ulysses_sequence_parallel_size=2 {REF}.ulysses_sequence_parallel_size=2",
    "fsdp2_offload": f"{ACTOR}.strategy=fsdp2 {REF}.strategy=fsdp2 {ACTOR}.fsdp_config.offload_policy=True",
    "two_nodes": "trainer.nnodes=2 trainer.n_gpus_per_node=16",
    "separate_async": SEPARATE,
    "budget_below_the_longest_possible_sequence": f"{ACTOR}.ppo_max_token_len_per_gpu=1200",
    "numbers_for_booleans": f"trainer.balance_batch=1 {ACTOR}.use_kl_loss=1 {MODEL}.use_remove_padding=1",
    "floats_for_counts": f"{ACTOR}.ppo_max_token_len_per_gpu=24576.0",
    "a_reward_module": "reward.custom_reward_function.path=pkg://my.rewards",
    "a_loss_and_an_estimator_of_the_users": f"{MODEL}.external_lib=my_lib algorithm.adv_estimator=mine "
    f"{ACTOR}.policy_loss.loss_mode=mine",
    "a_rollout_engine_of_a_plugin": f"{ROLLOUT}.name=mine",
    "data_elsewhere": "data.train_files=hdfs://cluster/rows.parquet data.val_files=s3://bucket/rows.parquet",
    "data_by_pattern": "data.train_files=/no/such/folder/*.parquet",
    "data_of_a_class_of_the_users": "data.custom_cls.path={data} data.custom_cls.name=Rows data.train_files=nowhere",
    "no_validation_files": "data.val_files=[]",
    "a_hub_model": f"{MODEL}.path=somebody/model",
    "a_model_on_hdfs": f"{MODEL}.path=hdfs://cluster/model",
    "a_class_of_the_checkpoints_own": f"{MODEL}.path={{own}} {MODEL}.trust_remote_code=True",
    "an_architecture_of_an_external_lib": f"{MODEL}.path={{own}} {MODEL}.external_lib=my_lib",
    "micro_batch_size_unused_under_dynamic_bsz": f"{MICRO}_per_gpu=0",
    "fully_async_streams": "data.train_batch_size=0 async_training.require_batches=4",
    "a_batch_that_v1_fills_up": ODD,
    "a_batch_of_another_size_in_v0": f"{V0} {ODD} data.gen_batch_size=8",
    "a_flag_that_verls_engine_does_not_read": f"{ACTOR}.qat.enable=True",
    "eager_attention_is_replaced": f"{MODEL}.override_config.attn_implementation=eager",
    "a_role_with_a_padding_flag_of_its_own": f"{ACTOR}.use_remove_padding=False",
    "heads_that_draft_rollouts": f"{MODEL}.mtp.enable=True {MODEL}.mtp.enable_rollout=True",
    "liger_without_its_package": f"{MODEL}.use_fused_kernels=True {MODEL}.fused_kernel_options.impl_backend=liger",
    "compiled": f"prefix_grouper.compile_layers=True {ACTOR}.strategy=fsdp2 {REF}.strategy=fsdp2",
    "an_agent_loop_file_of_verls_and_a_teacher_that_is_dropped": "distillation.enabled=True "
    f"{ROLLOUT}.agent.agent_loop_config_path=./protocol.py {ROLLOUT}.multi_turn.tool_config_path=protocol.py "
    "distillation.teacher_models.teacher_model.model_path=/gone "
    "+distillation.teacher_models.second={{model_path:Qwen/Qwen3-4B,key:all,num_replicas:0,inference:{{name:vllm}}}} "
    "distillation.nnodes=0",
    "a_number_of_sequences_that_verl_reads_for_no_critic": CRITIC.replace("gpu=8", "gpu=0")
    + "critic.use_dynamic_bsz=False",
    "a_critic_cut_by_sequences_in_its_engine_config": CRITIC.replace("gpu=8", "gpu=null")
    + "++critic.fsdp.use_dynamic_bsz=False ++critic.fsdp.micro_batch_size_per_gpu=8 critic.use_dynamic_bsz=True "
    "++critic.fsdp.infer_micro_batch_size_per_gpu=8",
    "old_log_probs_that_nobody_computes": "algorithm.rollout_correction.bypass_mode=True "
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=0",
    "a_reference_policy_that_is_the_actor_without_its_adapter": f"{MODEL}.lora_rank=8 {ACTOR}.strategy=fsdp2 "
    f"{ACTOR}.use_kl_loss=True {REF}.ulysses_sequence_parallel_size=3",
    "everything_of_ours": "prefix_grouper.activations=inputs prefix_grouper.carry=never prefix_grouper.verify=every_50 "
    "prefix_grouper.logits_chunk_size=0 prefix_grouper.verify_tolerance=0.01",
}


def errors(config: DictConfig) -> list[Issue]:
    return [issue for issue in preflight.preflight(config) if not issue.is_warning]


@pytest.mark.parametrize("name", WORKING)
def test_what_stock_verl_trains_is_not_refused(name: str, config_of, on_gpus) -> None:
    on_gpus(8)
    assert errors(config_of(WORKING[name], **SHARED)) == []


BESIDE, TEACHER = "distillation.teacher_models", "distillation.teacher_models.teacher_model"
TOP_K = "distillation.enabled=True distillation.distillation_loss.loss_mode=forward_kl_topk"
REFUSED: list[tuple[str, str, str]] = [
    # overrides, the last of which is named, part of the cause, part of the fix
    (f"{FEW} {ROLLOUT}.n=5 {MINI}=6", "do not divide into 8 data-parallel ranks", f"{MINI}=8 data.train_batch_size=8"),
    *(
        (f"{key}_micro_batch_size_per_gpu={value}", "number of sequences", "")
        for key, value in ((f"{ACTOR}.ppo", 0), (f"{REF}.log_prob", -1), (f"{ROLLOUT}.log_prob", "four"))
    ),
    (f"{MICRO}=8 {MICRO}_per_gpu=null", "number of sequences", f"in place of {MICRO}"),
    *((f"{MODEL}.lora_rank={rank}", "is no rank of at least 0", "") for rank in ("word", -1)),
    *((f"{BUDGET}={value}", "number of tokens", "") for value in ("8k", "inf")),
    *((f"{ROLLOUT}.name={name}", "names no rollout engine", "=vllm") for name in ("null", "None")),
    (f"{ROLLOUT}.name=hf {MODEL}.lora_rank=8", "has no slots for adapters", f"{MODEL}.lora.merge=True"),
    # Three would divide six, and heads cannot be spread over three.
    (f"trainer.n_gpus_per_node=6 ray_kwargs.ray_init.num_gpus=6 {SP}=4", "tokens do not divide 6", f"{SP}=2"),
    (f"{SP}=3", "cannot be spread", f"{SP}=1"),  # said once: the reference policy's own follows it in verl's config
    *(
        (override, "is no integer of at least 1", "")
        for override in (
            *("trainer.nnodes=two", f"{ROLLOUT}.n=0", f"{ROLLOUT}.n=null", f"{MINI}=-8"),
            *(f"{ROLLOUT}.n=4.0", f"{CRITIC} critic.ppo_mini_batch_size=0"),
            *(f"{SP}=0", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=two"),
        )
    ),
    (f"{CRITIC} +critic.ppo_infer_max_token_len_per_gpu=-5", "number of tokens", ""),
    ("ray_kwargs.ray_init.num_gpus=nan trainer.n_gpus_per_node=1", "Ray is told of 0", "num_gpus=1"),
    ("trainer.n_gpus_per_node=2", "2 worker processes are asked for", "num_gpus=2"),
    (f"{ROLLOUT}.name=vllm", "vllm is not installed", "pip install 'verl[vllm]'"),
    ("data.train_files=no_such.parquet", "does not exist", "data.train_files="),
    ("data.train_files={folder}", "is a folder", "data.train_files="),
    ("data.val_files=[{data},{folder}/gone.parquet]", "does not exist", ""),
    ("data.train_files={folder}/broken.parquet", "cannot be read as parquet", ""),
    ("data.val_files=[] data.prompt_key=question", "has no column 'question'; it has prompt", "prompt_key=prompt"),
    ("reward.custom_reward_function.path=/gone.py", "no such file", "=<file>"),
    (f"{ROLLOUT}.agent.agent_loop_config_path=gone.yaml", "no such file", "=<file>"),
    (f"distillation.enabled=True {TEACHER}.model_path=/gone", "no such folder", "=<folder>"),
    ("reward.reward_model.enable=True reward.reward_model.model_path=/gone", "no such folder", "=<folder>"),
    (f"{CRITIC} critic.model.lora_rank=8 +critic.model.lora_adapter_path=/gone", "no such folder", "hub id"),
    (f"{MODEL}.use_remove_padding=packed", "is not a boolean", ""),
    *((f"prefix_grouper={value}", "is not a section of options", "") for value in ("fast", "null")),
    (f"{MODEL}.use_fused_kernels=True {ACTOR}.calculate_sum_pi_squared=True", "have the probabilities", "=False"),
    (TOP_K, "no teacher on hf for its likeliest tokens", "=k3"),
    (f"+{BESIDE}.a.inference.name=vllm +{BESIDE}.b.inference.name=hf {TOP_K}", "no teacher on hf", "=k3"),
    (f"{TOP_K} {TEACHER}.inference.name=vllm {MODEL}.use_fused_kernels=True", "never have the logits that", "=False"),
    (f"{CRITIC} critic.ppo_mini_batch_size=6 {V0} {ODD}", "mini-batches divide it", "train_batch_size=24"),
    ("prefix_grouper.attention_kernel=flash_attn_2", "needs a cuda device", "=auto"),
    (f"{ROLLOUT}.log_prob_use_dynamic_bsz=True", "workers assert that", "=False"),
    (f"{MODEL}.use_remove_padding=False {ACTOR}.use_dynamic_bsz=True", "through the middle", "packed mode"),
    (f"{MODEL}.use_remove_padding=False {REF}.log_prob_use_dynamic_bsz=True", "through the middle", "packed mode"),
    (f"{ACTOR}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig", "verl ignores", "++"),
    (f"{REF}.fsdp_config.use_prefix_grouper=False", "must follow", "=True"),
    (f"{REF}.strategy=fsdp {ACTOR}.strategy=megatron", "FSDP and VeOmni", "model_engine=dp"),
    (f"{ACTOR}.fsdp_config.prefix_grouper=null", "would not see prefix_grouper", "=${prefix_grouper}'"),
    (f"{MODEL}.path=runs/models/mine", "no such folder", f"{MODEL}.path=<"),
]


@pytest.mark.parametrize(("overrides", "why", "fix"), REFUSED, ids=[row[0][:60] for row in REFUSED])
def test_what_is_certain_to_fail_is_one_error_with_key_cause_and_fix(overrides, why, fix, config_of) -> None:
    (issue,) = errors(config_of(overrides))
    last = overrides.split()[-1].lstrip("+")
    assert issue.key == last.partition("=")[0]
    assert issue.setting.lstrip("+").startswith(last.partition("{")[0].rstrip("[").replace("null", "None"))
    assert why in issue.why
    assert fix in issue.fix


def test_a_run_outside_of_what_was_tested_says_so_in_one_line_and_goes_on(config_of, monkeypatch, caplog) -> None:
    monkeypatch.setattr(compat, "untested", lambda: ["verl 0.10.0 is outside of what was tested, <0.10"])
    check(config_of())
    (record,) = (record for record in caplog.records if "outside of what was tested" in record.message)
    assert "\n" not in record.message


def test_a_setting_of_roles_that_follow_a_key_without_an_issue_is_refused(config_of) -> None:
    engines = " ".join(f"{role}.fsdp_config.pad_to_length=False" for role in (ACTOR, REF))  # which the actor's replaces
    found = errors(config_of(f"{MODEL}.use_remove_padding=False {ACTOR}.pad_to_length=True {engines}"))
    assert any("follows from the longest one" in issue.why for issue in found)


BY_CUT = [f"{ACTOR}.policy_loss.loss_mode={mode}" for mode in ("geo_mean", "clip_cov", "kl_cov")]
BY_CUT.append("".join(f" algorithm.rollout_correction.{x}=True" for x in ("bypass_mode", "rollout_is_batch_normalize")))


@pytest.mark.parametrize("mode", [Mode.PACKED, Mode.PADDED_GROUPS])
@pytest.mark.parametrize("overrides", BY_CUT)
def test_losses_that_look_at_a_micro_batch_alone_are_warned_of(overrides: str, mode: Mode, config_of) -> None:
    (issue,) = (issue for issue in preflight.preflight(config_of(overrides, mode)) if issue.is_warning)
    assert issue.setting == overrides.split()[-1]
    assert "each micro-batch alone there, and this plugin cuts others" in issue.why
    assert "=False" in issue.fix


def test_warnings_are_logged_and_end_no_run(config_of, caplog) -> None:
    offload = f"{MODEL}.enable_activation_offload=True {MODEL}.enable_gradient_checkpointing=False"
    by_cut = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm data.max_response_length=77"
    check(config_of(f"{offload} {MODEL}.override_config.attn_implementation=eager {BUDGET}=64.0 {by_cut}"))
    assert f"; {ACTOR}.loss_scale_factor=77" in caplog.text
    assert "holds 64 tokens, and a sequence of more, of up to" in caplog.text
    check(config_of(f"{MODEL}.enable_gradient_checkpointing=False prefix_grouper.activations=inputs_on_host"))
    assert "++prefix_grouper.activations=inputs_on_host: without gradient checkpointing" in caplog.text
    of_critic = f"{CRITIC} data.max_prompt_length=40000"  # in V1: a key that verl's files lack
    assert preflight.preflight(config_of(f"{of_critic} ++critic.ppo_infer_max_token_len_per_gpu=1e5")) == []
    check(config_of(of_critic))
    assert "; ++critic.ppo_infer_max_token_len_per_gpu=40511" in caplog.text
    check(config_of(f"{FEW} {MINI}=2 {ACTOR}.shuffle=True"))
    assert "a rank gets 1 of the 4 responses of a prompt" in caplog.text
    assert f"; {MINI}=8 data.train_batch_size=24" in caplog.text
    assert f"mini-batches get sequences, not groups; {ACTOR}.shuffle=False" in caplog.text
    check(config_of(f"{CRITIC} data.train_batch_size=0 async_training.require_batches=2 critic.shuffle=True"))
    assert "mini-batches get sequences, not groups; critic.shuffle=False" in caplog.text
    check(config_of("prefix_grouper.carry=never", Mode.RMPAD))
    assert f"++prefix_grouper have no effect; {ACTOR}.use_prefix_grouper=True" in caplog.text
    assert "attention over shared prefixes runs in its place" in caplog.text
    assert "nothing is offloaded" in caplog.text


def test_what_other_machines_have_is_a_warning_where_the_run_joins_a_cluster(config_of) -> None:
    elsewhere = f"{ROLLOUT}.name=vllm data.train_files=/there.parquet {MODEL}.path=/there "
    elsewhere += "prefix_grouper.attention_kernel=flash_attn_4 "
    assert len(errors(config_of(elsewhere))) == 4
    found = preflight.preflight(config_of(elsewhere + "ray_kwargs.ray_init.address=auto"))
    assert [issue.is_warning for issue in found] == [True] * 4


@pytest.mark.parametrize(
    ("there", "overrides", "fix"),
    [(7, "", "_node=7"), (7, SEPARATE, "_node=3"), (7, REWARD_POOL, "_node=3"), (0, "", "a trial")],
)
def test_gpus_that_are_asked_for_and_not_there(there: int, overrides: str, fix: str, config_of, on_gpus) -> None:
    """Those of a rollout or a reward model of its own count."""
    on_gpus(there)
    (issue,) = errors(config_of(overrides, **SHARED))
    assert f"8 GPUs are asked for, and {there} are there" in issue.why
    assert issue.fix.endswith(fix)
