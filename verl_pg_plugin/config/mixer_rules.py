"""What the ways in which a model mixes tokens do not run with; each mixer says it of itself."""

from __future__ import annotations

from verl_pg_plugin.config.facts import Facts
from verl_pg_plugin.config.rule import PACKED, PADDED_GROUPS, Rule, above_one, set_to
from verl_pg_plugin.mixers import MIXERS, Mixer, count_layers
from verl_pg_plugin.reason import Reason

__all__ = ["MIXER_RULES"]


def mixers_of(facts: Facts) -> list[Mixer]:
    return [MIXERS[name] for name in count_layers(facts.hf_config.get_text_config())]


def names(mixers: list[Mixer]) -> str:
    return ", ".join(mixer.name for mixer in mixers)


def bound_to_one_rank(facts: Facts) -> list[Mixer]:
    return [mixer for mixer in mixers_of(facts) if not mixer.spreads_over_ranks]


def bound_to_packed_rows(facts: Facts) -> list[Mixer]:
    return [mixer for mixer in mixers_of(facts) if not mixer.mixes_padded_groups]


def lacking(facts: Facts) -> list[Reason]:
    return [reason for mixer in mixers_of(facts) for reason in mixer.machine_obstacles(facts.device_name)]


MIXER_RULES: tuple[Rule, ...] = (
    Rule(
        "mixer_ulysses",
        PACKED,
        ("sp_size",),
        lambda value, facts: above_one(value, facts) and bool(bound_to_one_rank(facts)),
        lambda value, facts: (
            f"{names(bound_to_one_rank(facts))} layers of {facts.hf_config.model_type} do not mix rows that are spread "
            "over ranks"
        ),
        set_to("1"),
        needs_model=True,
    ),
    Rule(
        "mixer_padded_groups",
        PADDED_GROUPS,
        ("use_remove_padding",),
        lambda value, facts: bool(bound_to_packed_rows(facts)),
        lambda value, facts: (
            f"{names(bound_to_packed_rows(facts))} layers of {facts.hf_config.model_type} share packed rows only, not "
            "the padded groups of prefix_grouper mode"
        ),
        set_to("True"),
        needs_model=True,
    ),
    Rule(
        "mixer_keeps_mlps",
        PACKED,
        ("keep_activations",),
        lambda value, facts: value == "mlp" and set(mixers_of(facts)) != {MIXERS["attention"]},
        lambda value, facts: (
            f"layers of {facts.hf_config.model_type} that mix tokens without attention have no half that could be "
            "computed again alone"
        ),
        set_to("attention"),
        needs_model=True,
    ),
    Rule(
        "mixer_kernels",
        PACKED,
        ("use_remove_padding",),
        lambda value, facts: bool(lacking(facts)),
        lambda value, facts: "; ".join(reason.why for reason in lacking(facts)),
        lambda settings, facts: "; ".join(reason.fix for reason in lacking(facts)),
        needs_model=True,
    ),
)
