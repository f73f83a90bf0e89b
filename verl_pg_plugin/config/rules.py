"""The rule table: which settings a mode cannot run with, why, and what to set instead.

Source of the padded mode's list: the limitations that upstream's PrefixGrouper example documents.
To lift a restriction, delete its row.
"""

from __future__ import annotations

from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.architecture import REPLACED_ATTENTION
from verl_pg_plugin.config.engine_config import PrefixGrouperEngineConfig
from verl_pg_plugin.config.mode import USE_PREFIX_GROUPER, USE_REMOVE_PADDING, Mode
from verl_pg_plugin.config.rule import CRITIC, REF, Rule, add_as, packed_or, set_to
from verl_pg_plugin.config.violation import Setting

__all__ = ["RULES"]

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
OPTIONS = "prefix_grouper"
ENGINE_CONFIG = "verl_pg_plugin.config.PrefixGrouperEngineConfig"

ALL = frozenset(Mode)
PADDED = frozenset({Mode.PREFIX_GROUPER})
PACKED = frozenset({Mode.PACKED})
SHARING = frozenset({Mode.PREFIX_GROUPER, Mode.PACKED})

FSDP_STRATEGIES = ("fsdp", "fsdp2")

# Predicates: (value, config) -> does it break the rule


def is_on(value: Any, config: DictConfig) -> bool:
    return bool(value)


def is_off(value: Any, config: DictConfig) -> bool:
    return value is not None and not value


def above_one(value: Any, config: DictConfig) -> bool:
    return value is not None and value > 1


def splits_groups(value: Any, config: DictConfig) -> bool:
    return value is not None and value % OmegaConf.select(config, f"{ROLLOUT}.n") != 0


def differs_from_model(value: Any, config: DictConfig) -> bool:
    return value is not None and bool(value) != bool(OmegaConf.select(config, USE_REMOVE_PADDING))


def is_not_fsdp(value: Any, config: DictConfig) -> bool:
    return value not in FSDP_STRATEGIES


def is_other_attention(value: Any, config: DictConfig) -> bool:
    return value is not None and value not in REPLACED_ATTENTION


def is_stock_engine_config(value: Any, config: DictConfig) -> bool:
    if is_not_fsdp(OmegaConf.select(config, f"{ACTOR}.strategy"), config):
        return False  # the strategy rule speaks: there is no fsdp_config to look at
    return value is None or not issubclass(get_class(value), PrefixGrouperEngineConfig)


def differs_from_actor(value: Any, config: DictConfig) -> bool:
    if is_not_fsdp(OmegaConf.select(config, f"{ACTOR}.strategy"), config):
        return False
    return bool(value) != bool(OmegaConf.select(config, USE_PREFIX_GROUPER))


# Fixes: (offending settings, config) -> override


def next_multiple_of_n(settings: tuple[Setting, ...], config: DictConfig) -> str:
    n = OmegaConf.select(config, f"{ROLLOUT}.n")
    return " ".join(f"{setting.key}={-(-setting.value // n) * n}" for setting in settings)


def follow_model(settings: tuple[Setting, ...], config: DictConfig) -> str:
    return set_to(str(bool(OmegaConf.select(config, USE_REMOVE_PADDING))))(settings, config)


def follow_actor(settings: tuple[Setting, ...], config: DictConfig) -> str:
    return add_as(str(bool(OmegaConf.select(config, USE_PREFIX_GROUPER))))(settings, config)


def _in_both_roles(*names: str) -> tuple[str, ...]:
    return tuple(f"{role}.{name}" for role in (ACTOR, REF) for name in names)


def _in_engine_configs(name: str) -> tuple[str, ...]:
    return (*_in_both_roles(f"fsdp_config.{name}"), f"{CRITIC}.fsdp.{name}")


def _in_models(name: str) -> tuple[str, ...]:
    return (f"{MODEL}.{name}", f"{CRITIC}.model.{name}")


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
        _in_both_roles("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"),
        above_one,
        "sequence parallelism would cut padded groups at shard edges",
        packed_or(set_to("1")),
    ),
    Rule(
        "pad_to_length",
        PADDED,
        _in_both_roles("pad_to_length", "fsdp_config.pad_to_length"),
        is_on,
        "the length of padded groups follows from the longest one",
        packed_or(set_to("False")),
    ),
    Rule(
        "packed_options",
        PADDED,
        (f"{OPTIONS}.static_rows", f"{OPTIONS}.compile_layers"),
        is_on,
        "padded groups have no rows of one length",
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
        "static_rows_gate",
        PACKED,
        (f"{OPTIONS}.min_dedup_ratio",),
        lambda value, config: above_one(value, config) and bool(OmegaConf.select(config, f"{OPTIONS}.static_rows")),
        f"a micro-batch that stops sharing needs more rows than {OPTIONS}.static_rows=True has",
        set_to("1"),
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
        _in_both_roles("use_remove_padding"),
        differs_from_model,
        f"the mode follows from {USE_REMOVE_PADDING}; a role cannot leave it",
        follow_model,
    ),
    Rule(
        "ring_attention",
        SHARING,
        _in_both_roles("megatron.context_parallel_size", "torchtitan.context_parallel_size"),
        above_one,
        "ring attention computes each sequence alone and cannot see a shared prefix",
        set_to("1"),
    ),
    Rule(
        "attn_implementation",
        SHARING,
        _in_models("override_config.attn_implementation"),
        is_other_attention,
        f"attention over shared prefixes replaces {' and '.join(REPLACED_ATTENTION)}; another one would be ignored",
        set_to("sdpa"),
    ),
    Rule(
        "fsdp_strategy",
        SHARING,
        (*_in_both_roles("strategy"), f"{CRITIC}.strategy"),
        is_not_fsdp,
        "shared prefixes are implemented for verl's FSDP engine (fsdp, fsdp2) only",
        lambda settings, config: f"model_engine=dp {set_to('fsdp2')(settings, config)}",
    ),
    Rule(
        "engine_config_target",
        SHARING,
        _in_engine_configs("_target_"),
        is_stock_engine_config,
        f"without this plugin's engine config verl ignores {USE_PREFIX_GROUPER}",
        add_as(ENGINE_CONFIG),
    ),
    Rule(
        "engine_config_flag",
        ALL,
        _in_engine_configs("use_prefix_grouper"),
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
        _in_models("mtp.enable"),
        is_on,
        "multi-token prediction heads read several rows ahead, across the fork of a group",
        set_to("False"),
    ),
    Rule(
        "quantization_aware_training",
        SHARING,
        (f"{ACTOR}.qat.enable", *_in_engine_configs("qat.enable")),
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
