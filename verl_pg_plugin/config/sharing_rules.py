"""What neither mode that shares prefixes can run with. To lift a restriction, delete its row."""

from __future__ import annotations

from typing import Any

from hydra.utils import get_class

from verl_pg_plugin.architectures.checks import REPLACED_ATTENTION
from verl_pg_plugin.attention.kernels import ATTENTION_KERNEL, KERNELS
from verl_pg_plugin.config.facts import Facts, Role
from verl_pg_plugin.config.keys import FSDP_STRATEGIES, USE_PREFIX_GROUPER, USE_REMOVE_PADDING
from verl_pg_plugin.config.mode import is_set
from verl_pg_plugin.config.rule import ALL, SHARING, Rule, above_one, add_as, is_on, set_to
from verl_pg_plugin.config.violation import Setting

__all__ = ["SHARING_RULES"]

ENGINE_CONFIG = "verl_pg_plugin.config.PrefixGrouperEngineConfig"


def kernel_obstacle(value: Any, facts: Facts) -> str:
    """Of a kernel that is asked for by name; of ``auto`` the model decides (``model_rules``)."""
    return KERNELS[value].obstacle(facts.device_name) if value in KERNELS else ""


def lacks_kernel(value: Any, facts: Facts) -> bool:
    return bool(kernel_obstacle(value, facts))


def kernel_why(value: Any, facts: Facts) -> str:
    return kernel_obstacle(value, facts).partition(": ")[0]


def kernel_fix(settings: tuple[Setting, ...], facts: Facts) -> str:
    fix = kernel_obstacle(settings[0].value, facts).partition(": ")[2]
    return ", or ".join(dict.fromkeys([fix, f"++{ATTENTION_KERNEL}=auto"]))


def runs_fsdp(facts: Facts) -> bool:
    return facts.value("strategy") in FSDP_STRATEGIES


def is_stock_engine_config(value: Any, facts: Facts) -> bool:
    if not runs_fsdp(facts):
        return False  # the strategy rule speaks: there is no fsdp_config to look at
    return value is None or "prefix_grouper" not in getattr(get_class(value), "__dataclass_fields__", {})


SHARING_RULES: tuple[Rule, ...] = (
    Rule(
        "attention_kernel",
        SHARING,
        ("attention_kernel",),
        lacks_kernel,
        kernel_why,
        kernel_fix,
    ),
    Rule(
        "remove_padding_per_role",
        SHARING,
        ("role_remove_padding",),
        lambda value, facts: value is not None and is_set(value) != is_set(facts.value("use_remove_padding")),
        f"the mode follows from {USE_REMOVE_PADDING}; a role cannot leave it",
        lambda settings, facts: set_to(str(is_set(facts.value("use_remove_padding"))))(settings, facts),
        trainer_only="verl writes the model's flag into every engine config",
    ),
    Rule(
        "ring_attention",
        SHARING,
        ("context_parallel_size",),
        above_one,
        "ring attention computes each sequence alone and cannot see a shared prefix",
        set_to("1"),
        trainer_only="it is a setting of other engines",
    ),
    Rule(
        "critic_ulysses",
        SHARING,
        ("critic_sp_size",),
        lambda value, facts: above_one(value, facts) and value != facts.value("sp_size"),
        "the critic's engine reads the size from its section fsdp alone",
        lambda settings, facts: f"{facts.role.engine}.ulysses_sequence_parallel_size={settings[0].value}",
        trainer_only="the key is one that the engine does not read",
    ),
    Rule(
        "attn_implementation",
        SHARING,
        ("attn_implementation",),
        lambda value, facts: value is not None and value not in REPLACED_ATTENTION,
        f"attention over shared prefixes replaces {' and '.join(REPLACED_ATTENTION)}; another one would be ignored",
        set_to("sdpa"),
    ),
    Rule(
        "fsdp_strategy",
        SHARING,
        ("strategy",),
        lambda value, facts: value not in FSDP_STRATEGIES,
        "shared prefixes are implemented for verl's FSDP engine (fsdp, fsdp2) only",
        lambda settings, facts: f"model_engine=dp {set_to('fsdp2')(settings, facts)}",
    ),
    Rule(
        "engine_config_target",
        SHARING,
        ("engine_config_target",),
        is_stock_engine_config,
        f"without this plugin's engine config verl ignores {USE_PREFIX_GROUPER}",
        add_as(ENGINE_CONFIG),
        trainer_only="verl's own engine config makes verl's own engine",
    ),
    Rule(
        "engine_config_flag",
        ALL,
        ("engine_flag",),
        lambda value, facts: runs_fsdp(facts) and is_set(value) != is_set(facts.value("actor_flag")),
        f"the engine must follow {USE_PREFIX_GROUPER}, or old, ref and new log-probs take different paths",
        lambda settings, facts: add_as(str(is_set(facts.value("actor_flag"))))(settings, facts),
        trainer_only="an engine does not know what the others are told",
    ),
    Rule(
        "distillation",
        SHARING,
        ("distillation",),
        is_on,
        "teacher log-probs follow the unshared token order",
        set_to("False"),
        trainer_only="each mini-batch asks for it anew, and the engine refuses it there",
    ),
    Rule(
        "multi_token_prediction",
        SHARING,
        ("mtp",),
        is_on,
        "multi-token prediction heads read several rows ahead, across the fork of a group",
        set_to("False"),
        roles=frozenset({Role.ACTOR, Role.CRITIC}),  # verl switches them off for the reference policy
    ),
    Rule(
        "quantization_aware_training",
        SHARING,
        ("actor_qat", "qat"),
        is_on,
        "quantization-aware training has not been verified with shared prefixes",
        set_to("False"),
    ),
)
