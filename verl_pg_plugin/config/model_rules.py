"""Options that must fit the model they are given to."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from verl.utils.torch_dtypes import PrecisionType

from verl_pg_plugin.architectures.head_probe import fused_obstacle
from verl_pg_plugin.architectures.rotary_angles import FLOAT32_ANGLE_TYPES, fsdp2_recomputes_as_it_ran
from verl_pg_plugin.architectures.skeleton import text_skeleton
from verl_pg_plugin.attention.kernels import ATTENTION_KERNELS, KERNELS, candidates, model_misfit
from verl_pg_plugin.config.facts import Facts, Role
from verl_pg_plugin.config.keys import USE_PREFIX_GROUPER
from verl_pg_plugin.config.layer_compiler import asks_to_compile, model_obstacle
from verl_pg_plugin.config.rule import PACKED, SHARING, Rule, is_on, set_to
from verl_pg_plugin.config.violation import Setting
from verl_pg_plugin.mixers.attention import attention_needs

__all__ = ["MODEL_RULES"]


def heads_of(hf_config: Any) -> tuple[int, int]:
    """Query and key/value heads; 0 where a config of the checkpoint's own names them otherwise."""
    text = hf_config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", 0)
    return num_heads, getattr(text, "num_key_value_heads", None) or num_heads


def spreads(num_heads: int, num_kv_heads: int, sp_size: int) -> bool:
    """Each rank gets as many query heads, and key/value heads of its own or whole copies of one."""
    return num_heads % sp_size == 0 and (num_kv_heads % sp_size == 0 or sp_size % num_kv_heads == 0)


def cannot_spread(value: Any, facts: Facts) -> bool:
    num_heads, num_kv_heads = heads_of(facts.hf_config)
    # A size that is no positive integer is verl's to refuse; so are heads that nothing tells, when the model is built.
    return num_heads > 0 and isinstance(value, int) and value > 0 and not spreads(num_heads, num_kv_heads, value)


def next_smaller_size(settings: tuple[Setting, ...], facts: Facts) -> str:
    heads = heads_of(facts.hf_config)
    return " ".join(
        f"{setting.key}={max(size for size in range(1, setting.value) if spreads(*heads, size))}"
        for setting in settings
    )


def no_kernel_fits(value: Any, facts: Facts) -> str:
    """Why no attention kernel that the setting stands for computes the model, empty if one does."""
    if value not in (None, *ATTENTION_KERNELS):
        return ""  # the value itself is refused
    return model_misfit(value or "auto", facts.device_name, attention_needs(facts.hf_config.get_text_config()))


def kernel_that_fits(settings: tuple[Setting, ...], facts: Facts) -> str:
    needs = attention_needs(facts.hf_config.get_text_config())
    fitting = [kernel for kernel, spec in KERNELS.items() if spec.package and not spec.misfit(needs)]
    stock = f"{USE_PREFIX_GROUPER}=False (stock verl)"
    if not fitting:
        return stock
    kernel = fitting[-1]  # of packages the one for most GPUs
    if kernel not in candidates("auto", facts.device_name):
        return f"++{settings[0].key}={kernel} (on another device), or {stock}"
    missing = KERNELS[kernel].obstacle(facts.device_name)
    way = KERNELS[kernel].install if missing else f"++{settings[0].key}={kernel}"
    return f"{way}, or {stock}"


def head_is_not_fused(facts: Facts) -> str:
    """Why verl's fused kernels cannot stand in for the head of transformers' own class, empty if they can.

    A class that the checkpoint brings along is examined by the engine that has built it.
    """
    known = type(facts.hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return fused_obstacle(text_skeleton(facts.hf_config)) if known else ""


def cannot_checkpoint(hf_config: Any) -> bool:
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False  # a class of the checkpoint's own: verl asks it
    return not MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)].supports_gradient_checkpointing


def recomputes_other_angles(facts: Facts) -> bool:
    """Whether FSDP2 gives a layer rotary angles of another dtype in its recomputation than in its forward."""
    casts = facts.value("strategy") == "fsdp2" and not PrecisionType.is_fp32(facts.value("param_dtype"))
    return casts and facts.hf_config.model_type in FLOAT32_ANGLE_TYPES and not fsdp2_recomputes_as_it_ran()


MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "compile_layers_model",
        PACKED,
        ("compile_layers",),
        lambda value, facts: asks_to_compile(value) and bool(model_obstacle(facts.hf_config.model_type)),
        lambda value, facts: model_obstacle(facts.hf_config.model_type),
        set_to("False"),
        needs_model=True,
    ),
    Rule(
        "ulysses_heads",
        SHARING,
        ("sp_size",),
        cannot_spread,
        lambda value, facts: "{} query and {} key/value heads cannot be spread over so many ranks".format(
            *heads_of(facts.hf_config)
        ),
        next_smaller_size,
        needs_model=True,
    ),
    Rule(
        "fused_kernels_model",
        PACKED,
        ("use_fused_kernels",),
        lambda value, facts: is_on(value, facts) and bool(head_is_not_fused(facts)),
        lambda value, facts: head_is_not_fused(facts),
        set_to("False"),
        roles=frozenset({Role.ACTOR, Role.REF}),
        needs_model=True,
    ),
    Rule(
        "gradient_checkpointing_model",
        SHARING,
        ("gradient_checkpointing",),
        lambda value, facts: is_on(value, facts) and cannot_checkpoint(facts.hf_config),
        lambda value, facts: f"transformers has no gradient checkpointing for {facts.hf_config.model_type}",
        set_to("False"),
        needs_model=True,
    ),
    Rule(
        "gradient_checkpointing_angles",
        SHARING,
        ("gradient_checkpointing",),
        lambda value, facts: is_on(value, facts) and recomputes_other_angles(facts),
        lambda value, facts: (
            f"FSDP2 of torch {torch.__version__} recomputes layers of {facts.hf_config.model_type} with rotary angles "
            "of another dtype than their forward had, so that the first update fails, in stock verl too"
        ),
        lambda settings, facts: (
            f"{set_to('False')(settings, facts)}, or {facts.role.value}.strategy=fsdp, "
            "or pip install 'torch>=2.13,<2.14'"
        ),
        roles=frozenset({Role.ACTOR, Role.CRITIC}),
        needs_model=True,
    ),
    Rule(
        "attention_kernel_model",
        SHARING,
        ("attention_kernel",),
        lambda value, facts: bool(no_kernel_fits(value, facts)),
        lambda value, facts: f"no kernel for {facts.hf_config.model_type}: {no_kernel_fits(value, facts)}",
        kernel_that_fits,
        needs_model=True,
    ),
)
