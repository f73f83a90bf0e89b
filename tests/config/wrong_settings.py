"""Settings that a run used to fail with minutes after Ray had started: the overrides, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Wrong:
    """One row.

    Attributes:
        overrides: as typed; ``{folder}`` stands for the folder of :func:`prepare_folder`.
        key: the setting that the first line of the list names.
        why: part of the cause.
        fix: how the fix begins, empty where it is the key.
    """

    overrides: tuple[str, ...]
    key: str
    why: str
    fix: str = ""


def one(override: str, why: str, fix: str = "") -> Wrong:
    return Wrong((override,), override.lstrip("+").partition("=")[0], why, fix)


COUNT, SWITCH = "is not a positive integer", "is not a boolean"
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ROLLOUT}.checkpoint_engine.backend=nccl",
    f"{ROLLOUT}.n_gpus_per_node=1",
    "+ray_kwargs.ray_init.num_gpus=2",
    f"{ROLLOUT}.nnodes=1",
)
DYNAMIC = (f"{ACTOR}.use_dynamic_bsz=True",)

WRONG: tuple[Wrong, ...] = (
    # Counts and numbers
    one(f"{ROLLOUT}.n=0", COUNT),
    one(f"{ROLLOUT}.n=four", COUNT),
    one(f"{ROLLOUT}.n=1.5", COUNT),
    one("data.train_batch_size=-1", COUNT),
    one("data.max_prompt_length=1k", COUNT),
    one("data.max_response_length=0", COUNT),
    one("trainer.n_gpus_per_node=0", COUNT),
    one("trainer.nnodes=two", COUNT),
    one("trainer.total_epochs=0", COUNT),
    one("trainer.total_training_steps=0", COUNT),
    one(f"{ACTOR}.ppo_epochs=0", COUNT),
    one(f"{ACTOR}.ppo_mini_batch_size=0", COUNT),
    one(f"{ACTOR}.ppo_micro_batch_size_per_gpu=abc", COUNT),
    one(f"{ACTOR}.ppo_max_token_len_per_gpu=16k", COUNT),
    one(f"{ACTOR}.ulysses_sequence_parallel_size=0", COUNT),
    one(f"{ROLLOUT}.temperature=0", "log-probs are divided by it"),
    one(f"{ROLLOUT}.gpu_memory_utilization=80", "a share above 0 and up to 1"),
    one(f"{ACTOR}.optim.lr=-1", "a number of at least 0"),
    # Switches and words
    one(f"{ACTOR}.use_kl_loss=no", SWITCH),
    one(f"{ACTOR}.use_dynamic_bsz=yes", SWITCH),
    one("data.filter_overlong_prompts=off", SWITCH),
    one("trainer.balance_batch=no", SWITCH),
    one(f"{ACTOR}.use_prefix_grouper=no", SWITCH),
    one(f"{MODEL}.use_remove_padding=packed", SWITCH),
    one("prefix_grouper.static_rows=no", SWITCH),
    one("prefix_grouper.logits_chunk_size=abc", "is not an integer"),
    one("prefix_grouper.attention_kernel=flash", "is unknown; the values are auto"),
    one("+prefix_grouper.chunk=1", "there is no such option", "~prefix_grouper.chunk"),
    one("algorithm.adv_estimator=grop", "is unknown; the values are gae, grpo"),
    one(f"{ACTOR}.policy_loss.loss_mode=vanila", "is unknown; the values are vanilla"),
    one(f"{ACTOR}.kl_loss_type=k9", "is unknown; the values are kl, k1"),
    one(f"{ROLLOUT}.name=vlm", "is unknown; the values are vllm"),
    one("trainer.resume_mode=always", "is unknown; the values are disable, auto, resume_path"),
    one("trainer.v1.trainer_mode=fast", "is unknown; the values are"),
    one("trainer.logger=[console,wanbd]", "wanbd is no logger of verl's"),
    one(
        "trainer.logger=[console,clearml]", "which is not installed", "pip install clearml, or trainer.logger=[console]"
    ),
    # Machines
    one("trainer.n_gpus_per_node=4", "4 worker processes are asked for and Ray is told of 1", "++ray_kwargs"),
    Wrong(
        (
            "trainer.n_gpus_per_node=3",
            "+ray_kwargs.ray_init.num_gpus=3",
            "data.train_batch_size=6",
            f"{ACTOR}.ulysses_sequence_parallel_size=2",
        ),
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "does not divide",
    ),
    one(f"{ROLLOUT}.tensor_model_parallel_size=2", "a server of the rollout takes 2 GPUs"),
    one(f"{ROLLOUT}.name=vllm", "vllm is not installed", "pip install 'vllm==0.24.0'"),
    one(f"{ROLLOUT}.name=sglang", "sglang is not installed", "pip install 'sglang==0.5.12'"),
    Wrong(
        (*SEPARATE, "data.train_batch_size=6"),
        "data.train_batch_size",
        "a batch must be 4 mini-batches of 2 prompts",
        "data.train_batch_size=8",
    ),
    Wrong((*SEPARATE[:-1], "data.train_batch_size=8"), f"{ROLLOUT}.nnodes", "the rollout needs GPUs of its own"),
    # Budgets
    Wrong(
        (*DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=1022"),
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "needs 1023 tokens",
        f"{ACTOR}.ppo_max_token_len_per_gpu=1023",
    ),
    Wrong(
        (f"{ROLLOUT}.log_prob_use_dynamic_bsz=True", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=8"),
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        "needs 1023 tokens",
    ),
    # Files
    one("data.train_files=no_such.parquet", "does not exist"),
    one("data.val_files=[{folder}/rows.parquet,{folder}/gone.parquet]", "gone.parquet does not exist"),
    one("data.train_files={folder}", "is a folder"),
    one("data.train_files={folder}/rows.csv", "is of no kind that verl reads"),
    one("data.train_files={folder}/broken.parquet", "cannot be read as parquet"),
    one("data.train_files=[]", "names no file"),
    one("data.prompt_key=question", "has no column 'question'; it has prompt", "data.prompt_key=prompt"),
    one("data.train_files={folder}/strings.parquet", "holds string; verl reads a list of messages", "write ["),
    one("data.train_files={folder}/no_source.parquet", "has no column 'data_source'", "add the column"),
    one("data.train_files={folder}/no_truth.parquet", "has no field 'ground_truth'", "write {"),
    Wrong(
        ("data.train_files={folder}/lines.jsonl",),
        "data.prompt_key",
        "has no column 'prompt'; it has question, data_source, reward_model",
    ),
    one("data.train_batch_size=9", "a step takes 9 prompts, and there are 8", "data.train_batch_size=8"),
    Wrong(("data.train_max_samples=2",), "data.train_batch_size", "a step takes 4 prompts, and there are 2"),
    one("data.val_files={folder}/empty.parquet", "has no row"),
    Wrong(
        ("data.filter_overlong_prompts=True", "data.max_prompt_length=2"),
        "data.max_prompt_length",
        "leaves none of 8 prompts, and a step takes 4; the shortest has 3 tokens",
    ),
    Wrong(
        ("data.filter_overlong_prompts=True", f"{MODEL}.custom_chat_template='{{{{ messages[0].text.first }}}}'"),
        "data.train_files",
        "the chat template of the tokenizer cannot be applied",
        f"{MODEL}.custom_chat_template=",
    ),
    one("reward.custom_reward_function.path={folder}/gone.py", "no such file"),
    Wrong(
        ("reward.custom_reward_function.path={folder}/reward.py", "reward.custom_reward_function.name=scores"),
        "reward.custom_reward_function.name",
        "does not define scores; it defines score",
    ),
    one("reward.custom_reward_function.path={folder}/broken.py", "is no Python: ", "repair "),
    one(f"{ROLLOUT}.multi_turn.function_tool_path={{folder}}/gone.py", "no such file"),
    one("trainer.rollout_data_dir={folder}/rows.csv/dumps", "rows.csv is no folder"),
    Wrong(
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path={folder}"),
        "trainer.resume_from_path",
        "wants a folder named global_step_<number>",
    ),
    # Models
    one(f"{MODEL}.path=/no/such/model", "no such folder"),
    one(f"{MODEL}.path='~/no_such_model'", "no such folder"),
    one(f"{MODEL}.path={{folder}}", "the folder has no config.json"),
    one(f"{MODEL}.tokenizer_path={{folder}}", "the folder has no tokenizer", "save one there"),
    one(f"{MODEL}.path=nobody/no-such-model", "and HF_HUB_OFFLINE forbids to download it", "a folder"),
    one(f"{MODEL}.path='a b/c'", "is neither a folder nor a name that a hub could have", "a folder"),
    Wrong((f"{MODEL}.path={{folder}}/gemma2",), "prefix_grouper.attention_kernel", "no kernel for gemma2"),
    one(f"{MODEL}.path={{folder}}/bloom", "attention interface", "another checkpoint"),
    # The rules of the mode, and verl's own
    one("distillation.enabled=True", "teacher log-probs follow"),
    one(f"{ACTOR}.strategy=megatron", "for verl's FSDP engine", "model_engine=dp"),
    one(f"{ACTOR}.qat.enable=True", "quantization-aware training"),
    Wrong((f"{ACTOR}.loss_agg_mode=mean",), "", "Invalid loss_agg_mode: mean", "change what it names"),
    Wrong((f"{ACTOR}.ppo_micro_batch_size_per_gpu=null",), "", "Please set at least one of", "change what it names"),
)
