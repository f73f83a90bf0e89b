"""What packed mode cannot run with. To lift a restriction, delete its row."""

from __future__ import annotations

from typing import Any

from verl_pg_plugin.config.facts import Facts, Role
from verl_pg_plugin.config.fused_kernels import fused_backend_problem
from verl_pg_plugin.config.keys import OPTIONS
from verl_pg_plugin.config.layer_compiler import asks_to_compile, compiler_obstacle
from verl_pg_plugin.config.rule import PACKED, Rule, is_off, is_on, is_verifying, set_to

__all__ = ["PACKED_RULES"]

ACTOR_AND_REF = frozenset({Role.ACTOR, Role.REF})
FLAT_PARAMETERS = f"{OPTIONS}.compile_layers=True would do nothing: torch compiles no layer of flat parameters (FSDP1)"


def stays_uncompiled(value: Any, facts: Facts) -> bool:
    """Whether compiled layers are asked for under FSDP1 without ``use_orig_params``, the value."""
    return asks_to_compile(facts.value("compile_layers")) and facts.value("strategy") == "fsdp" and not value


def keeps_layers(value: Any) -> bool:
    """Whether ``keep_activations`` asks for whole layers, whatever the run."""
    return value not in (None, "auto", "attention")


def lacks_fused_backend(value: Any, facts: Facts) -> bool:
    asked = is_on(facts.value("use_fused_kernels"), facts)
    return asked and fused_backend_problem(value, facts.device_name) is not None


def fused_backend_why(value: Any, facts: Facts) -> str:
    problem = fused_backend_problem(value, facts.device_name)
    assert problem is not None
    return f"impl_backend={value} {problem}"


PACKED_RULES: tuple[Rule, ...] = (
    Rule(
        "static_rows_budget",
        PACKED,
        ("use_dynamic_bsz", "old_log_prob_dynamic_bsz"),
        lambda value, facts: is_off(value, facts) and is_on(facts.value("static_rows"), facts),
        f"{OPTIONS}.static_rows=True pads to the token budget, which fixed micro-batch sizes do not have",
        set_to("True"),
    ),
    Rule(
        "static_rows_fallback",
        PACKED,
        ("on_mismatch",),
        lambda value, facts: value == "rmpad" and is_on(facts.value("static_rows"), facts),
        f"a micro-batch that stops sharing needs more rows than {OPTIONS}.static_rows=True has",
        set_to("raise"),
    ),
    Rule(
        "verify_offload",
        PACKED,
        ("activation_offload",),
        lambda value, facts: is_on(value, facts) and is_verifying(facts.value("verify"), facts),
        f"verl's activation offload counts on one forward per step, and {OPTIONS}.verify adds others",
        lambda settings, facts: f"{set_to('False')(settings, facts)}, or ++{OPTIONS}.verify=off",
    ),
    Rule(
        "compile_layers_fsdp1",
        PACKED,
        ("use_orig_params",),
        stays_uncompiled,
        FLAT_PARAMETERS,
        set_to("True"),
        roles=ACTOR_AND_REF,
    ),
    Rule(
        "compile_critic_layers_fsdp1",
        PACKED,
        ("use_orig_params",),
        stays_uncompiled,
        FLAT_PARAMETERS,
        set_to("True"),
        roles=frozenset({Role.CRITIC}),
    ),
    Rule(
        "compile_layers_compiler",
        PACKED,
        ("compile_layers",),
        lambda value, facts: asks_to_compile(value) and bool(compiler_obstacle(facts.device_name)),
        lambda value, facts: compiler_obstacle(facts.device_name),
        set_to("False"),
    ),
    Rule(
        "keep_activations_without_checkpointing",
        PACKED,
        ("keep_activations",),
        lambda value, facts: keeps_layers(value) and is_off(facts.value("gradient_checkpointing"), facts),
        "without gradient checkpointing every layer keeps everything",
        set_to("attention"),
        roles=frozenset({Role.ACTOR}),
    ),
    Rule(
        "keep_activations_offloaded",
        PACKED,
        ("keep_activations",),
        lambda value, facts: keeps_layers(value) and is_on(facts.value("activation_offload"), facts),
        "verl's activation offload checkpoints layers in its own way, and keeps nothing of them on the device",
        set_to("attention"),
    ),
    Rule(
        "keep_activations_recomputed",
        PACKED,
        ("recompute_attention",),
        lambda value, facts: is_on(value, facts) and keeps_layers(facts.value("keep_activations")),
        f"{OPTIONS}.keep_activations keeps whole layers, attention's output with them",
        set_to("False"),
    ),
    Rule(
        "fused_kernels_backend",
        PACKED,
        ("fused_backend",),
        lacks_fused_backend,
        fused_backend_why,
        set_to("torch"),
        roles=ACTOR_AND_REF,
    ),
    Rule(
        "fused_kernels_sum_pi_squared",
        PACKED,
        ("sum_pi_squared",),
        lambda value, facts: is_on(value, facts) and is_on(facts.value("use_fused_kernels"), facts),
        "verl's fused kernels never have the probabilities that it sums",
        set_to("False"),
        trainer_only="each mini-batch asks for it anew, and the engine refuses it there",
    ),
)
