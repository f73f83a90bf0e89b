"""The rule table: which settings a mode cannot run with, why, and what to set instead.

The validators ask it before Ray starts, and every engine when it is built; both get the same words.
"""

from __future__ import annotations

from verl_pg_plugin.config.mixer_rules import MIXER_RULES
from verl_pg_plugin.config.modality_rules import MODALITY_RULES
from verl_pg_plugin.config.model_rules import MODEL_RULES
from verl_pg_plugin.config.packed_rules import PACKED_RULES
from verl_pg_plugin.config.padded_rules import PADDED_RULES
from verl_pg_plugin.config.rule import Rule
from verl_pg_plugin.config.sharing_rules import SHARING_RULES

__all__ = ["RULES"]

RULES: tuple[Rule, ...] = (
    *PADDED_RULES,
    *PACKED_RULES,
    *SHARING_RULES,
    *MODEL_RULES,
    *MIXER_RULES,
    *MODALITY_RULES,
)
