"""What padded groups cannot run with: a group must reach the model whole and in order.

Source: the limitations that upstream's PrefixGrouper example documents. To lift one, delete its row.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from verl_pg_plugin.config.facts import Facts, Role
from verl_pg_plugin.config.layer_compiler import asks_to_compile
from verl_pg_plugin.config.packed_rules import keeps_layers
from verl_pg_plugin.config.rule import PADDED_GROUPS, Rule, above_one, is_on, is_verifying, packed_or, set_to
from verl_pg_plugin.config.violation import Setting

__all__ = ["PADDED_RULES"]

ACTOR_AND_REF = frozenset({Role.ACTOR, Role.REF})


def splits_groups(value: Any, facts: Facts) -> bool:
    n = facts.value("rollout_n")
    if not isinstance(value, int) or not isinstance(n, int) or n < 1:
        return False  # verl's own checks speak
    return value % n != 0


def next_multiple_of_n(settings: tuple[Setting, ...], facts: Facts) -> str:
    n = facts.value("rollout_n")
    return " ".join(f"{setting.key}={-(-setting.value // n) * n}" for setting in settings)


PADDED_RULES: tuple[Rule, ...] = (
    Rule(
        "balance_batch",
        PADDED_GROUPS,
        ("balance_batch",),
        is_on,
        "balancing reorders single samples across ranks and tears groups apart",
        packed_or(set_to("False")),
        trainer_only="the trainer hands out samples",
    ),
    Rule(
        "dynamic_bsz",
        PADDED_GROUPS,
        ("use_dynamic_bsz", "old_log_prob_dynamic_bsz"),
        is_on,
        "dynamic micro-batches are cut by token count, through the middle of a group",
        packed_or(set_to("False")),
        roles=ACTOR_AND_REF,
    ),
    Rule(
        "critic_padding",
        PADDED_GROUPS,
        ("use_remove_padding",),
        lambda value, facts: is_on(facts.value("use_dynamic_bsz"), facts),
        "verl cuts the critic's micro-batches by tokens, which padded groups do not support",
        set_to("True"),
        roles=frozenset({Role.CRITIC}),
    ),
    Rule(
        "micro_batch_holds_groups",
        PADDED_GROUPS,
        ("micro_batch_size",),
        splits_groups,
        "a micro-batch that is no multiple of actor_rollout_ref.rollout.n cuts a group in two",
        packed_or(next_multiple_of_n),
        trainer_only="no engine is told rollout.n",
    ),
    Rule(
        "fused_kernels",
        PADDED_GROUPS,
        ("use_fused_kernels", "role_fused_kernels"),
        is_on,
        "the LM head runs on columns of padded groups and would bypass verl's fused one",
        packed_or(set_to("False")),
    ),
    Rule(
        "ulysses",
        PADDED_GROUPS,
        ("sp_size",),
        above_one,
        "sequence parallelism would cut padded groups at shard edges",
        packed_or(set_to("1")),
    ),
    Rule(
        "pad_to_length",
        PADDED_GROUPS,
        ("pad_to_length",),
        is_on,
        "the length of padded groups follows from the longest one",
        packed_or(set_to("False")),
    ),
    Rule(
        "static_rows",
        PADDED_GROUPS,
        ("static_rows",),
        is_on,
        "the length of padded groups follows from the longest one",
        packed_or(set_to("False")),
    ),
    Rule(
        "compile_layers",
        PADDED_GROUPS,
        ("compile_layers",),
        lambda value, facts: asks_to_compile(value),
        "compiled layers have not been verified with padded groups",
        packed_or(set_to("False")),
    ),
    Rule(
        "keep_activations",
        PADDED_GROUPS,
        ("keep_activations",),
        lambda value, facts: keeps_layers(value),
        "layers that keep their activations have not been verified with padded groups",
        packed_or(set_to("attention")),
    ),
    Rule(
        "dedup_gate",
        PADDED_GROUPS,
        ("min_dedup_ratio",),
        above_one,
        "padded groups cannot turn into plain rmpad",
        packed_or(set_to("1")),
    ),
    Rule(
        "verify",
        PADDED_GROUPS,
        ("verify",),
        is_verifying,
        "padded groups have no rows of a sample alone to compare with",
        packed_or(set_to("off")),
    ),
    Rule(
        "prefix_grouper_library",
        PADDED_GROUPS,
        ("use_remove_padding",),
        lambda value, facts: importlib.util.find_spec("prefix_grouper") is None,
        "padded groups are made by upstream's library, which is not installed",
        lambda settings, facts: f"pip install prefix_grouper, or {set_to('True')(settings, facts)} (packed mode)",
    ),
)
