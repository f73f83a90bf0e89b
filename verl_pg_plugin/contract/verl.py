"""The parts of verl that this package overrides, calls or replaces, and how they must look.

``changes()`` compares this table, and those of transformers and torch, with what is installed; the doctor
(``python -m verl_pg_plugin doctor --full``) shows the result, and a test fails when the package imports a name that no
table lists. After a difference was looked at and our code still fits, correct the table.
"""

from __future__ import annotations

from verl_pg_plugin.contract.table import EXISTS, VERL_VERSION, Part, differences, parts_of
from verl_pg_plugin.contract.torch import TORCH_PARTS
from verl_pg_plugin.contract.transformers import TRANSFORMERS_PARTS
from verl_pg_plugin.contract.verl_cpu import VERL_CPU_PARTS

__all__ = ["PARTS", "VERL_PARTS", "changes"]

_ENGINE = "verl.workers.engine.fsdp.transformer_impl"


def _parts(owner: str, used_by: str, /, needs: str = "", **signatures: str) -> tuple[Part, ...]:
    return parts_of(owner, used_by, VERL_VERSION, needs=needs, **signatures)


VERL_PARTS: tuple[Part, ...] = (
    # Module functions that upstream/ replaces.
    *_parts("verl.trainer.main_ppo", "upstream/entry_points.py", pprint=EXISTS),
    *_parts("verl.trainer.ppo.v1.trainer_base", "upstream/entry_points.py", tqdm=EXISTS),
    *_parts("verl.trainer.ppo.ray_trainer", "upstream/entry_points.py", tqdm=EXISTS),
    *_parts("verl.utils.logger", "upstream/entry_points.py", LocalLogger="(print_to_console=True)"),
    *_parts("verl.trainer.ppo.v1.trainer_base.PPOTrainer", "trainer/v1.py", fit="(self, agent_loop_manager)"),
    *_parts(
        _ENGINE,
        "upstream/cpu.py upstream/engines.py",
        prepare_micro_batches=(
            "(data, dp_group=None, num_batches_divided_by=None, same_micro_num_in_dp=True, "
            "min_num_micro_batch=None, use_dynamic_bsz_balance=True)"
        ),
        postprocess_batch_func="(output_lst, indices, data)",
        CPUOffloadPolicy="(pin_memory, ...)",
        apply_monkey_patch="(model, ulysses_sp_size, use_remove_padding, use_fused_kernels, ...)",
    ),
    *_parts(
        "verl.workers.engine.fsdp.utils",
        "cpu/received_weights.py",
        unfuse_moe_params="(weights, model_type=None)",
    ),
    *_parts(
        "verl.utils.model",
        "upstream/engines.py",
        load_valuehead_model="(local_path, torch_dtype, model_config, trust_remote_code)",
    ),
    *_parts(
        "verl.utils.distributed",
        "upstream/cpu.py",
        initialize_global_process_group_ray="(timeout_second, backend, ...)",
    ),
    # Engines: methods that are overridden, or called on the engine.
    *_parts(
        _ENGINE,
        "engine/fsdp_engine.py",
        FSDPEngineWithLMHead="(model_config, engine_config, optimizer_config, checkpoint_config)",
        FSDPEngineWithValueHead="(model_config, engine_config, optimizer_config, checkpoint_config)",
    ),
    *_parts(
        f"{_ENGINE}.FSDPEngine",
        "engine/fsdp_engine.py engine/shared_prefix_engine.py",
        __init__="(self, model_config, engine_config, optimizer_config, checkpoint_config)",
        initialize="(self)",
        _build_module="(self)",
        _build_lora_module="(self, module)",
        _build_fsdp_module="(self, module)",
        forward_backward_batch="(self, data, loss_function, forward_only=False)",
        optimizer_step="(self)",
        get_data_parallel_group="(self)",
    ),
    *_parts(
        "verl.workers.engine.base.BaseEngine",
        "engine/mfu_clock.py",
        train_batch="(self, data, loss_function)",
        infer_batch="(self, data, loss_function=None)",
    ),
    *_parts(
        f"{_ENGINE}.FSDPEngineWithLMHead",
        "engine/model_passes.py engine/shared_prefix_engine.py",
        forward_step="(self, micro_batch, loss_function, forward_only)",
        prepare_model_inputs="(self, micro_batch)",
        prepare_model_outputs="(self, output, output_args, micro_batch, logits_processor_func)",
    ),
    *_parts(
        f"{_ENGINE}.FSDPEngineWithValueHead",
        "engine/model_passes.py engine/shared_prefix_engine.py",
        forward_step="(self, micro_batch, loss_function, forward_only)",
        prepare_model_inputs="(self, micro_batch)",
        prepare_model_outputs="(self, output, output_args, micro_batch, logits_processor_func)",
    ),
    *_parts(
        "verl.workers.engine.base",
        "config/in_force.py config/other_packages.py engine/registration.py cli/doctor/fresh_process.py",
        BaseEngine=EXISTS,
        EngineRegistry=EXISTS,
    ),
    *_parts(
        "verl.workers.engine.base.EngineRegistry",
        "config/in_force.py config/other_packages.py engine/registration.py",
        _engines=EXISTS,
        register="(model_type, backend, device='cuda', vendor=None)",
        get_engine_cls="(model_type, backend)",
    ),
    *_parts(
        "verl.utils.activation_offload",
        "upstream/engines.py",
        ActivationHandler="(offload_ctx, sync_func, tensor_filter, enable_ckpt)",
    ),
    *_parts(
        "verl.utils.activation_offload.AsyncDoubleBufferGroupOffloadHandler",
        "upstream/engines.py",
        groupid_reset="(self)",
    ),
    # Configs: the fields that are read.
    *_parts(
        "verl.workers.config",
        "config/engine_config.py engine/requirements.py engine/steps/keep.py",
        FSDPEngineConfig=(
            "(strategy, forward_only, use_dynamic_bsz, use_torch_compile, pad_to_length, pad_to_length_bucket, "
            "entropy_checkpointing, entropy_from_logits_with_chunking, entropy_from_logits_chunk_size, "
            "ulysses_sequence_parallel_size, mixed_precision, qat, ...)"
        ),
    ),
    *_parts("verl.workers.config.FSDPEngineConfig", "config/engine_config.py", __post_init__="(self)"),
    *_parts(
        "verl.workers.config",
        "cpu/rollout.py cpu/server.py engine/requirements.py engine/steps/keep.py",
        HFModelConfig=(
            "(path, local_path, hf_config, model_type, architectures, generation_config, tokenizer, "
            "trust_remote_code, external_lib, override_config, use_remove_padding, use_fused_kernels, "
            "use_liger, tiled_mlp, fused_kernel_options, mtp, ...)"
        ),
    ),
    *_parts(
        "verl.workers.config",
        "cpu/rollout.py cpu/server.py",
        RolloutConfig=(
            "(dtype, seed, max_num_seqs, max_model_len, prompt_length, response_length, ignore_eos, logprobs_mode, "
            "load_format, checkpoint_engine, ...)"
        ),
    ),
    # Entry point and trainers.
    *_parts("verl.trainer.main_ppo", "main_ppo.py", TaskRunnerV1=EXISTS),
    *_parts("verl.trainer.main_ppo", "main_ppo.py upstream/entry_points.py", run_ppo="(config, task_runner_class)"),
    *_parts("verl.trainer.main_ppo.TaskRunnerV1.__ray_actor_class__", "main_ppo.py", run="(self, config, ...)"),
    *_parts("verl.trainer.main_ppo_v0", "main_ppo.py", TaskRunner=EXISTS),
    *_parts(
        "verl.trainer.ppo.utils",
        "config/facts.py config/checkpoint_checks.py config/before_ray/budgets.py config/before_ray/verls_own.py "
        "cli/doctor/sharing.py",
        need_critic="(config)",
        need_reference_policy="(config)",
    ),
    *_parts("verl.trainer.ppo.v1", "main_ppo.py upstream/trainers.py", get_trainer_cls="(name)"),
    *_parts("verl.trainer.ppo.v1", "cpu/agent_loop_v1.py", AgentLoopManagerTQ=EXISTS, AgentLoopWorkerTQ=EXISTS),
    *_parts(
        "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ",
        "cpu/agent_loop_v1.py",
        __init__="(self, *args, **kwargs)",
        generate_sequences="(self, prompts)",
    ),
    *_parts("verl.trainer.ppo.v1.trainer_base", "upstream/trainers.py", TRAINER_REGISTRY=EXISTS),
    *_parts(
        "verl.trainer.ppo.v1.trainer_base.PPOTrainer",
        "trainer/any_trainer.py trainer/keeps_groups.py trainer/v1.py",
        __init__="(self, config)",
        _balance_batch="(self, batch, metrics, logging_prefix='global_seqlen', keep_minibatch=False)",
        _update_actor="(self, batch, metrics)",
    ),
    *_parts("verl.trainer.ppo.ray_trainer", "upstream/trainers.py", RayPPOTrainer=EXISTS),
    *_parts("verl.trainer.ppo.ray_trainer.RayPPOTrainer", "upstream/trainers.py", fit="(self)"),
    *_parts(
        "verl.trainer.ppo.ray_trainer.RayPPOTrainer",
        "trainer/any_trainer.py trainer/keeps_groups.py trainer/v0.py upstream/trainers.py",
        _balance_batch="(self, batch, metrics, logging_prefix='global_seqlen', keep_minibatch=False)",
        _update_actor="(self, batch)",
    ),
    *_parts(
        "verl.trainer.ppo.v1.replay_buffer",
        "cpu/replay_buffer.py",
        ReplayBuffer="(trainer_mode, sampler_kwargs, poll_interval, ...)",
        ReplayBufferAsync="(trainer_mode, sampler_kwargs, poll_interval, ...)",
    ),
    # Words that settings may hold.
    *_parts(
        "verl.trainer.ppo.core_algos",
        "config/before_ray/values.py",
        ADV_ESTIMATOR_REGISTRY=EXISTS,
        POLICY_LOSS_REGISTRY=EXISTS,
    ),
    *_parts("verl.trainer.ppo.v1.trainer_base", "config/before_ray/values.py", TRAINER_REGISTRY=EXISTS),
    *_parts("verl.utils.tracking", "config/before_ray/values.py", Tracking=EXISTS),
    *_parts("verl.utils.tracking.Tracking", "config/before_ray/values.py", supported_backend=EXISTS),
    *_parts("verl.workers.rollout.replica", "config/before_ray/values.py", RolloutReplicaRegistry=EXISTS),
    *_parts("verl.workers.rollout.replica.RolloutReplicaRegistry", "config/before_ray/values.py", _registry=EXISTS),
    # Functions that are called.
    *_parts(
        "verl.utils.config",
        "cpu/server.py config/before_ray/verls_own.py trainer/whole_groups.py upstream/entry_points.py",
        omega_conf_to_dataclass="(config, dataclass_type=None)",
        validate_config="(config, use_reference_policy, use_critic)",
    ),
    *_parts(
        "verl.utils.device",
        "config/facts.py config/before_ray/machines.py cli/doctor/fresh_process.py cli/doctor/overrides.py "
        "engine/device_memory.py engine/fsdp_engine.py engine/heads/fused_head.py engine/local_choices.py "
        "engine/mfu_clock.py engine/shared_prefix_engine.py engine/steps/keep.py main_ppo.py",
        get_vendor="()",
        auto_set_device="(config)",
        get_device_id="()",
        get_device_name="()",
        get_torch_device="()",
    ),
    *_parts("verl.utils.flops_counter", "engine/mfu_clock.py", get_device_flops="(unit='T', device_name=None)"),
    *_parts(
        "verl.utils.import_utils",
        "config/before_ray/values.py config/checkpoint_checks.py",
        import_external_libs="(external_libs=None)",
    ),
    # 0.9.1 has it in verl.utils.import_utils too.
    *_parts("verl.experimental.agent_loop.utils", "config/before_ray/files.py", resolve_config_path="(config_path)"),
    *_parts(
        "verl.utils.model",
        "config/checkpoint_checks.py cli/doctor/sharing.py",
        update_model_config="(module_config, override_config_kwargs)",
    ),
    *_parts(
        "verl.utils.seqlen_balancing",
        "trainer/whole_groups.py",
        log_seqlen_unbalance="(seqlen_list, partitions, prefix)",
    ),
    *_parts(
        "verl.utils.tensordict_utils",
        "engine/fsdp_engine.py engine/heads/fused_head.py engine/batch/limits.py engine/requirements.py "
        "engine/batch/layout_field.py engine/batch/row_selection.py engine/sharing_modes.py engine/steps/verify.py "
        "synthetic.py upstream/engines.py",
        get="(tensordict, key, default=None)",
        assign_non_tensor="(tensor_dict, **kwargs)",
        assign_non_tensor_data="(tensor_dict, key, val)",
        get_non_tensor_data="(data, key, default)",
        index_select_tensor_dict="(batch, indices)",
        nested_tensor_from_tensor_list="(tensors, ragged_idx=None)",
    ),
    *_parts("verl.utils.torch_dtypes", "config/model_rules.py", PrecisionType=EXISTS),
    *_parts("verl.utils.torch_dtypes.PrecisionType", "config/model_rules.py", is_fp32="(precision)"),
    *_parts("verl.utils.torch_dtypes", "cpu/server.py", PrecisionType=EXISTS),
    *_parts("verl.utils.torch_dtypes.PrecisionType", "cpu/server.py", to_dtype="(precision)"),
    *_parts(
        "verl.utils.torch_functional",
        "engine/heads/lm_head.py",
        calculate_sum_pi_squared_from_logits="(logits)",
        logprobs_from_logits="(logits, labels, inplace_backward=True)",
    ),
    *_parts(
        "verl.utils.experimental.torch_functional",
        "engine/heads/fused_head.py",
        FusedLinearForPPO=EXISTS,  # 0.9.0 takes no impl_backend
    ),
    *_parts(
        "verl.utils.experimental.torch_functional.FusedLinearForPPO",
        "engine/heads/fused_head.py",
        forward="(self, hidden_states, vocab_weights, input_ids, temperature=1.0)",
    ),
    *_parts(
        "verl.utils.kernel.linear_cross_entropy",
        "engine/heads/fused_head.py",
        needs="triton",
        linear_cross_entropy=EXISTS,
    ),
    *_parts(
        "verl.utils.attention_utils",
        "attention/padded_groups.py models/packed_inputs.py",
        index_first_axis="(*args, **kwargs)",
        pad_input="(*args, **kwargs)",
        unpad_input="(*args, **kwargs)",
    ),
    *_parts(
        "verl.utils.ulysses",
        "attention/ulysses.py engine/batch/row_shard.py models/packed_inputs.py",
        gather_heads_scatter_seq="(x, head_dim, seq_dim, group=None)",
        gather_seq_scatter_heads="(x, seq_dim, head_dim, unpadded_dim_size=0, group=None)",
        gather_outputs_and_unpad="(x, gather_dim, unpad_dim=None, padding_size=0, grad_scaler=True, group=None)",
        get_ulysses_sequence_parallel_group="()",
        get_ulysses_sequence_parallel_world_size="(group=None)",
        ulysses_pad_and_slice_inputs=(
            "(input_ids_rmpad, position_ids_rmpad=None, sp_size=1, skip_position_ids_rmpad=False, pad_value=0)"
        ),
    ),
)

PARTS = VERL_PARTS + VERL_CPU_PARTS + TRANSFORMERS_PARTS + TORCH_PARTS


def changes() -> list[str]:
    """One readable message for every part that is missing or looks otherwise than listed."""
    return differences(PARTS)
