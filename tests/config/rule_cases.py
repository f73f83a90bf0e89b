"""Settings that break the rule of that name, one entry per way to break it."""

from __future__ import annotations

from typing import Any

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
STOCK_ENGINE_CONFIG = "verl.workers.config.FSDPEngineConfig"
WITH_CRITIC = {
    "algorithm.adv_estimator": "gae",
    "critic.model.path": f"${{{MODEL}.path}}",
    "critic.ppo_micro_batch_size_per_gpu": 8,
}
GEMMA2, JETMOE, HYBRID = "<a Gemma2 checkpoint>", "<a JetMoe checkpoint>", "<a Qwen3-Next checkpoint>"
VISION, QWEN3 = "<a Qwen3-VL checkpoint>", "<a Qwen3 checkpoint>"
"""Stand for the folder of one: a head that caps its output, layers without gradient checkpointing, or with states, or a
tower for pictures."""

Cases = dict[str, list[dict[str, Any]]]

BREAKING: Cases = {
    "dynamic_bsz": [{f"{ACTOR}.use_dynamic_bsz": True}, {f"{REF}.log_prob_use_dynamic_bsz": True}],
    "critic_padding": [WITH_CRITIC],
    "fused_kernels": [{f"{MODEL}.use_fused_kernels": True}],
    "ulysses": [
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2},
        {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2},
        {f"{REF}.ulysses_sequence_parallel_size": 4},
        {f"{REF}.fsdp_config.ulysses_sequence_parallel_size": 2},
        {**WITH_CRITIC, "critic.fsdp.ulysses_sequence_parallel_size": 2},
    ],
    "pad_to_length": [{f"{ACTOR}.pad_to_length": True}, {f"{REF}.fsdp_config.pad_to_length": True}],
    "static_rows": [{"prefix_grouper.static_rows": True}],
    "compile_layers": [{"prefix_grouper.compile_layers": True}],
    "dedup_gate": [{"prefix_grouper.min_dedup_ratio": 1.5}],
    "verify": [{"prefix_grouper.verify": "first"}, {"prefix_grouper.verify": "every_n"}],
    "prefix_grouper_library": [{}],  # the fixture of the tests takes it away
    "static_rows_budget": [
        {"prefix_grouper.static_rows": True, f"{ACTOR}.use_dynamic_bsz": False},
        {"prefix_grouper.static_rows": True, f"{REF}.log_prob_use_dynamic_bsz": False},
    ],
    "static_rows_fallback": [{"prefix_grouper.static_rows": True, "prefix_grouper.on_mismatch": "rmpad"}],
    "verify_offload": [
        {"prefix_grouper.verify": "first", f"{MODEL}.enable_activation_offload": True},
        {**WITH_CRITIC, "prefix_grouper.verify": "first", "critic.model.enable_activation_offload": True},
    ],
    "keep_activations": [{"prefix_grouper.keep_activations": "all"}],
    "keep_activations_without_checkpointing": [
        {"prefix_grouper.keep_activations": 4.5, f"{MODEL}.enable_gradient_checkpointing": False}
    ],
    "keep_activations_offloaded": [
        {"prefix_grouper.keep_activations": "all", f"{MODEL}.enable_activation_offload": True}
    ],
    "keep_activations_recomputed": [{"prefix_grouper.keep_activations": 8, "prefix_grouper.recompute_attention": True}],
    "compile_layers_fsdp1": [{"prefix_grouper.compile_layers": True, f"{ACTOR}.strategy": "fsdp"}],
    "compile_critic_layers_fsdp1": [
        {**WITH_CRITIC, "prefix_grouper.compile_layers": True, "critic.strategy": "fsdp"},
    ],
    "compile_layers_compiler": [{"prefix_grouper.compile_layers": True}],  # the fixture of the tests takes it away
    # The fixture lets Qwen3 break; FSDP1 alone would be reason enough.
    "compile_layers_model": [
        {
            "prefix_grouper.compile_layers": True,
            f"{MODEL}.path": QWEN3,
            f"{ACTOR}.strategy": "fsdp2",
            f"{REF}.strategy": "fsdp2",
        }
    ],
    "fused_kernels_backend": [
        {f"{MODEL}.use_fused_kernels": True, f"{MODEL}.fused_kernel_options.impl_backend": name}
        for name in ("cutlass", "triton", "liger")
    ],
    "attention_kernel_model": [{f"{MODEL}.path": GEMMA2}],  # caps its scores, which no kernel for a CPU does
    "attention_kernel": [{"prefix_grouper.attention_kernel": name} for name in ("torch_varlen", "flash_attn_2")],
    "attn_implementation": [
        {f"{MODEL}.override_config.attn_implementation": "flex_attention"},
        {**WITH_CRITIC, "critic.model.override_config.attn_implementation": "eager"},
    ],
    "fsdp_strategy": [
        {f"{ACTOR}.strategy": name}
        for name in ("megatron", "veomni", "torchtitan", "automodel", "mindspeed", "fsdp_turbo")
    ]
    + [{f"{REF}.strategy": "megatron"}, {**WITH_CRITIC, "critic.strategy": "megatron"}],
    "multi_token_prediction": [{f"{MODEL}.mtp.enable": True}],
    "quantization_aware_training": [
        {f"{ACTOR}.fsdp_config.qat.enable": True},
        {f"{REF}.fsdp_config.qat.enable": True},
    ],
    "ulysses_heads": [
        {f"{ACTOR}.ulysses_sequence_parallel_size": 3},
        {**WITH_CRITIC, "critic.fsdp.ulysses_sequence_parallel_size": 3},
    ],
    "mixer_ulysses": [{f"{MODEL}.path": HYBRID, f"{ACTOR}.ulysses_sequence_parallel_size": 2}],
    "mixer_padded_groups": [{f"{MODEL}.path": HYBRID}],
    "mixer_keeps_mlps": [{f"{MODEL}.path": HYBRID, "prefix_grouper.keep_activations": "mlp"}],
    "mixer_kernels": [{f"{MODEL}.path": HYBRID}],  # the fixture of the tests takes fla away
    "modality_padded_groups": [{f"{MODEL}.path": VISION}],
    "tower_attention": [{f"{MODEL}.path": VISION}],  # there is no flash-attn for a CPU
    "fused_kernels_model": [{f"{MODEL}.path": GEMMA2, f"{MODEL}.use_fused_kernels": True}],
    "gradient_checkpointing_angles": [
        {f"{MODEL}.enable_gradient_checkpointing": True, f"{ACTOR}.strategy": "fsdp2"}  # before torch 2.13
    ],
    "gradient_checkpointing_model": [{f"{MODEL}.path": JETMOE, f"{MODEL}.enable_gradient_checkpointing": True}],
}
"""What both the validators and the engine see."""

BREAKING_FOR_THE_TRAINER: Cases = {
    "balance_batch": [{"trainer.balance_batch": True}],
    "dynamic_bsz": [{f"{ROLLOUT}.log_prob_use_dynamic_bsz": True}],
    "micro_batch_holds_groups": [
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 6},
        {f"{REF}.log_prob_micro_batch_size_per_gpu": 1},
        {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 9},
        {f"{ROLLOUT}.n": 5},
    ],
    "fused_kernels": [{f"{ACTOR}.use_fused_kernels": True}],
    "static_rows_budget": [{"prefix_grouper.static_rows": True, f"{ROLLOUT}.log_prob_use_dynamic_bsz": False}],
    "fused_kernels_sum_pi_squared": [{f"{MODEL}.use_fused_kernels": True, f"{ACTOR}.calculate_sum_pi_squared": True}],
    "remove_padding_per_role": [{f"{ACTOR}.use_remove_padding": True, f"{REF}.use_remove_padding": False}],
    "ring_attention": [
        {f"{ACTOR}.megatron.context_parallel_size": 2},
        {f"{REF}.torchtitan.context_parallel_size": 2},
    ],
    "critic_ulysses": [{**WITH_CRITIC, "critic.ulysses_sequence_parallel_size": 2}],
    "engine_config_target": [
        {f"{ACTOR}.fsdp_config._target_": STOCK_ENGINE_CONFIG},
        {f"{REF}.fsdp_config._target_": STOCK_ENGINE_CONFIG},
        {**WITH_CRITIC, "critic.fsdp._target_": STOCK_ENGINE_CONFIG},
    ],
    "engine_config_flag": [
        {f"{ACTOR}.fsdp_config.use_prefix_grouper": True, f"{REF}.fsdp_config.use_prefix_grouper": False}
    ],
    "distillation": [{"distillation.enabled": True}],
    "quantization_aware_training": [{f"{ACTOR}.qat.enable": True}],
    "attn_implementation": [{f"{MODEL}.override_config.attn_implementation": "ring_flash_attention"}],
}
"""What the engine does not see, because only the trainer reads it or verl stops on the way."""
