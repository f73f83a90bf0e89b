"""What models that read more than text do not run with."""

from __future__ import annotations

import importlib.util
from typing import Any

from verl_pg_plugin.config.facts import Facts
from verl_pg_plugin.config.rule import PACKED, PADDED_GROUPS, Rule, add_as, set_to
from verl_pg_plugin.modalities import Modality, modality_obstacles, modality_of

__all__ = ["MODALITY_RULES"]

VERL_DEFAULT = "flash_attention_2"
"""What verl asks transformers for where ``attn_implementation`` is not set."""


def modality(facts: Facts) -> Modality | None:
    """What the model reads; None if nothing that prefixes can be shared in, which is refused elsewhere."""
    return None if modality_obstacles(facts.hf_config) else modality_of(facts.hf_config)


def is_out_of_place(value: Any, facts: Facts) -> bool:
    found = modality(facts)
    return found is not None and not found.in_padded_groups


def tower_cannot_attend(value: Any, facts: Facts) -> bool:
    """Layers of the text model get our attention, a tower the one that was asked for."""
    found = modality(facts)
    if found is None or not found.towers or (value or VERL_DEFAULT) != VERL_DEFAULT:
        return False
    return facts.device_name != "cuda" or importlib.util.find_spec("flash_attn") is None


MODALITY_RULES: tuple[Rule, ...] = (
    Rule(
        "modality_padded_groups",
        PADDED_GROUPS,
        ("use_remove_padding",),
        is_out_of_place,
        lambda value, facts: (
            f"{facts.hf_config.model_type} reads pictures, which packed rows hold and the padded groups of "
            "prefix_grouper mode do not"
        ),
        set_to("True"),
        needs_model=True,
    ),
    Rule(
        "tower_attention",
        PACKED,
        ("attn_implementation",),
        tower_cannot_attend,
        lambda value, facts: (
            f"the vision tower of {facts.hf_config.model_type} would run {VERL_DEFAULT}, verl's default, which needs "
            f"a GPU and flash-attn; this machine's device is {facts.device_name!r}"
        ),
        add_as("sdpa"),
        needs_model=True,
    ),
)
