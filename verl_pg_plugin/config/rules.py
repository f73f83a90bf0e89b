"""The rule table: which settings a mode cannot run with, why, and what to set instead.

Source of the padded mode's list: the limitations that upstream's PrefixGrouper example documents.
To lift a restriction, delete its row.
"""

from __future__ import annotations

from omegaconf import OmegaConf
from verl.utils.device import get_device_name

from verl_pg_plugin.architectures.checks import REPLACED_ATTENTION
from verl_pg_plugin.config.fused_kernels import BACKEND, fused_backend_obstacle
from verl_pg_plugin.config.mode import USE_PREFIX_GROUPER, USE_REMOVE_PADDING
from verl_pg_plugin.config.rule import CRITIC, REF, Rule, add_as, packed_or, set_to
from verl_pg_plugin.config.rule_parts import (
    ACTOR,
    ALL,
    ENGINE_CONFIG,
    MODEL,
    OPTIONS,
    PACKED,
    PADDED,
    ROLLOUT,
    SHARING,
    above_one,
    differs_from_actor,
    differs_from_model,
    follow_actor,
    follow_model,
    in_both_roles,
    in_engine_configs,
    in_models,
    is_not_fsdp,
    is_off,
    is_on,
    is_other_attention,
    is_stock_engine_config,
    is_verifying,
    next_multiple_of_n,
    splits_groups,
    stays_uncompiled,
)

__all__ = ["RULES"]

FLAT_PARAMETERS = f"{OPTIONS}.compile_layers=True would do nothing: torch compiles no layer of flat parameters (FSDP1)"

RULES: tuple[Rule, ...] = (
    # The padded mode: a group must reach the model whole and in order.
    Rule(
        "balance_batch",
        PADDED,
        ("trainer.balance_batch",),
        is_on,
        "balancing reorders single samples across ranks and tears groups apart",
        packed_or(set_to("False")),
    ),
    Rule(
        "dynamic_bsz",
        PADDED,
        (f"{ACTOR}.use_dynamic_bsz", f"{REF}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_use_dynamic_bsz"),
        is_on,
        "dynamic micro-batches are cut by token count, through the middle of a group",
        packed_or(set_to("False")),
    ),
    Rule(
        "micro_batch_holds_groups",
        PADDED,
        (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            f"{REF}.log_prob_micro_batch_size_per_gpu",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        ),
        splits_groups,
        "a micro-batch that is no multiple of actor_rollout_ref.rollout.n cuts a group in two",
        packed_or(next_multiple_of_n),
    ),
    Rule(
        "fused_kernels",
        PADDED,
        (f"{MODEL}.use_fused_kernels", f"{ACTOR}.use_fused_kernels"),
        is_on,
        "the LM head runs on columns of padded groups and would bypass verl's fused one",
        packed_or(set_to("False")),
    ),
    Rule(
        "ulysses",
        PADDED,
        in_both_roles("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"),
        above_one,
        "sequence parallelism would cut padded groups at shard edges",
        packed_or(set_to("1")),
    ),
    Rule(
        "pad_to_length",
        PADDED,
        in_both_roles("pad_to_length", "fsdp_config.pad_to_length"),
        is_on,
        "the length of padded groups follows from the longest one",
        packed_or(set_to("False")),
    ),
    Rule(
        "static_rows",
        PADDED,
        (f"{OPTIONS}.static_rows",),
        is_on,
        "the length of padded groups follows from the longest one",
        packed_or(set_to("False")),
    ),
    Rule(
        "compile_layers",
        PADDED,
        (f"{OPTIONS}.compile_layers",),
        is_on,
        "compiled layers have not been verified with padded groups",
        packed_or(set_to("False")),
    ),
    Rule(
        "dedup_gate",
        PADDED,
        (f"{OPTIONS}.min_dedup_ratio",),
        above_one,
        "padded groups cannot turn into plain rmpad",
        packed_or(set_to("1")),
    ),
    Rule(
        "verify",
        PADDED,
        (f"{OPTIONS}.verify",),
        is_verifying,
        "padded groups have no rows of a sample alone to compare with",
        packed_or(set_to("off")),
    ),
    # Packed mode.
    Rule(
        "static_rows_budget",
        PACKED,
        (f"{ACTOR}.use_dynamic_bsz", f"{REF}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_use_dynamic_bsz"),
        lambda value, config: is_off(value, config) and bool(OmegaConf.select(config, f"{OPTIONS}.static_rows")),
        f"{OPTIONS}.static_rows=True pads to the token budget, which fixed micro-batch sizes do not have",
        set_to("True"),
    ),
    Rule(
        "static_rows_fallback",
        PACKED,
        (f"{OPTIONS}.on_mismatch",),
        lambda value, config: value == "rmpad" and bool(OmegaConf.select(config, f"{OPTIONS}.static_rows")),
        f"a micro-batch that stops sharing needs more rows than {OPTIONS}.static_rows=True has",
        set_to("raise"),
    ),
    Rule(
        "verify_offload",
        PACKED,
        in_models("enable_activation_offload"),
        lambda value, config: bool(value) and is_verifying(OmegaConf.select(config, f"{OPTIONS}.verify"), config),
        f"verl's activation offload counts on one forward per step, and {OPTIONS}.verify adds others",
        lambda settings, config: f"{set_to('False')(settings, config)}, or {OPTIONS}.verify=off",
    ),
    Rule(
        "compile_layers_fsdp1",
        PACKED,
        in_both_roles("fsdp_config.use_orig_params"),
        stays_uncompiled(f"{ACTOR}.strategy"),
        FLAT_PARAMETERS,
        set_to("True"),
    ),
    Rule(
        "compile_critic_layers_fsdp1",
        PACKED,
        (f"{CRITIC}.fsdp.use_orig_params",),
        stays_uncompiled(f"{CRITIC}.strategy"),
        FLAT_PARAMETERS,
        set_to("True"),
    ),
    Rule(
        "fused_kernels_backend",
        PACKED,
        (BACKEND,),
        lambda value, config: (
            bool(OmegaConf.select(config, f"{MODEL}.use_fused_kernels"))
            and bool(fused_backend_obstacle(value, get_device_name()))
        ),
        "this machine cannot run that back end of verl's fused kernels",
        set_to("torch"),
    ),
    Rule(
        "fused_kernels_sum_pi_squared",
        PACKED,
        (f"{ACTOR}.calculate_sum_pi_squared",),
        lambda value, config: bool(value) and bool(OmegaConf.select(config, f"{MODEL}.use_fused_kernels")),
        "verl's fused kernels never have the probabilities that it sums",
        set_to("False"),
    ),
    # Both modes that share prefixes.
    Rule(
        "remove_padding_per_role",
        SHARING,
        in_both_roles("use_remove_padding"),
        differs_from_model,
        f"the mode follows from {USE_REMOVE_PADDING}; a role cannot leave it",
        follow_model,
    ),
    Rule(
        "ring_attention",
        SHARING,
        in_both_roles("megatron.context_parallel_size", "torchtitan.context_parallel_size"),
        above_one,
        "ring attention computes each sequence alone and cannot see a shared prefix",
        set_to("1"),
    ),
    Rule(
        "critic_ulysses",
        SHARING,
        (f"{CRITIC}.ulysses_sequence_parallel_size",),
        lambda value, config: (
            above_one(value, config)
            and value != OmegaConf.select(config, f"{CRITIC}.fsdp.ulysses_sequence_parallel_size")
        ),
        "the critic's engine reads the size from its section fsdp alone",
        lambda settings, config: f"{CRITIC}.fsdp.ulysses_sequence_parallel_size={settings[0].value}",
    ),
    Rule(
        "attn_implementation",
        SHARING,
        in_models("override_config.attn_implementation"),
        is_other_attention,
        f"attention over shared prefixes replaces {' and '.join(REPLACED_ATTENTION)}; another one would be ignored",
        set_to("sdpa"),
    ),
    Rule(
        "fsdp_strategy",
        SHARING,
        (*in_both_roles("strategy"), f"{CRITIC}.strategy"),
        is_not_fsdp,
        "shared prefixes are implemented for verl's FSDP engine (fsdp, fsdp2) only",
        lambda settings, config: f"model_engine=dp {set_to('fsdp2')(settings, config)}",
    ),
    Rule(
        "engine_config_target",
        SHARING,
        in_engine_configs("_target_"),
        is_stock_engine_config,
        f"without this plugin's engine config verl ignores {USE_PREFIX_GROUPER}",
        add_as(ENGINE_CONFIG),
    ),
    Rule(
        "engine_config_flag",
        ALL,
        in_engine_configs("use_prefix_grouper"),
        differs_from_actor,
        f"the engine must follow {USE_PREFIX_GROUPER}, or old, ref and new log-probs take different paths",
        follow_actor,
    ),
    Rule(
        "v1_trainer",
        SHARING,
        ("trainer.use_v1",),
        is_off,
        "the legacy trainer hands over padded batches that the engine no longer reads",
        set_to("True"),
    ),
    Rule(
        "distillation",
        SHARING,
        ("distillation.enabled",),
        is_on,
        "teacher log-probs follow the unshared token order",
        set_to("False"),
    ),
    Rule(
        "multi_token_prediction",
        SHARING,
        in_models("mtp.enable"),
        is_on,
        "multi-token prediction heads read several rows ahead, across the fork of a group",
        set_to("False"),
    ),
    Rule(
        "quantization_aware_training",
        SHARING,
        (f"{ACTOR}.qat.enable", *in_engine_configs("qat.enable")),
        is_on,
        "quantization-aware training has not been verified with shared prefixes",
        set_to("False"),
    ),
    Rule(
        "critic_padding",
        SHARING,
        (f"{CRITIC}.model.use_remove_padding",),
        is_off,
        "verl's V1 trainer cuts the critic's micro-batches by tokens, which padded groups do not support",
        set_to("True"),
    ),
)
