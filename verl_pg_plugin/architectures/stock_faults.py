"""What stock verl is known to compute wrongly, told where the plugin is loaded and leaves a run to it."""

from __future__ import annotations

from transformers import PretrainedConfig

from verl_pg_plugin.attention.kernels import kernel_obstacle, model_obstacle
from verl_pg_plugin.mixers import MIXERS, count_layers
from verl_pg_plugin.mixers.attention import attention_needs
from verl_pg_plugin.mixers.gated_delta.kernels import has_fla
from verl_pg_plugin.mixers.gated_delta.layer import GATED_DELTA
from verl_pg_plugin.mixers.gated_delta.mixer import MULTIMODAL_MODEL_TYPES
from verl_pg_plugin.reason import Reason

PACKED_AS_RMPAD = (
    "set actor_rollout_ref.actor.use_prefix_grouper=True, with ++prefix_grouper.min_dedup_ratio=1e9 for rmpad without "
    "sharing, or actor_rollout_ref.model.use_remove_padding=False"
)

POSITIONS_KEPT: frozenset[str] = frozenset({"ministral3", "persimmon"})
"""Types of text models whose attention does not hand ``position_ids`` to the function that attends (transformers 5.5.3
to 5.10.4; Fuyu's text is Persimmon's). flash-attn learns from nothing else where a sequence begins; torch's own
attention has a mask."""


def rmpad_fault(hf_config: PretrainedConfig, device_name: str) -> Reason | None:
    """Why stock verl's rmpad mode computes a model wrongly, and what to do instead; None if nothing is known.

    Args:
        hf_config: of the checkpoint, with the ``attn_implementation`` that verl loads it with; without one it is
            flash-attn, which is verl's default.
    """
    text = hf_config.get_text_config()
    faults = (_carried_states(hf_config, device_name), _unknown_starts(text, device_name), _uncapped(text, device_name))
    for fault in filter(None, faults):
        why = f"stock verl's rmpad mode computes {hf_config.model_type} wrongly: {fault.why}"
        return Reason(why, f"{fault.fix}, or {PACKED_AS_RMPAD}" if fault.fix else PACKED_AS_RMPAD)
    return None


def _carried_states(hf_config: PretrainedConfig, device_name: str) -> Reason | None:
    """Recurrent layers that run from sequence to sequence.

    verl 0.9.1 lays sequences one after the other and tells attention where each begins, but not the recurrence: from
    the second sequence on, its layers start from the state of the one before. Tiny models with random weights are off
    by 0.30 (Qwen3-Next), 0.35 (Qwen3.5, text) and 0.31 (Qwen3.5, multimodal) in a log-prob. verl's own forward of
    multimodal Qwen3.5 does tell fla's kernels, which transformers' fallback ignores (by its source; not run on a GPU).
    """
    config = hf_config.get_text_config()
    if not count_layers(config)[GATED_DELTA] or MIXERS[GATED_DELTA].obstacles(config):
        return None
    if hf_config.model_type in MULTIMODAL_MODEL_TYPES and device_name == "cuda" and has_fla():
        return None
    return Reason(
        "its Gated DeltaNet layers carry the state of each sequence into the next, so log-probs and gradients depend "
        "on what else a micro-batch holds"
    )


def _attends_with(text: PretrainedConfig, device_name: str) -> str:
    """The ``attn_implementation``; empty where it is no flash-attn."""
    implementation = text._attn_implementation or "flash_attention_2"
    return implementation if device_name == "cuda" and "flash" in implementation else ""


def _unknown_starts(text: PretrainedConfig, device_name: str) -> Reason | None:
    """Attention that sees the sequences packed in front of its own: a tiny Ministral 3 on an H200 was off by 10%."""
    if text.model_type not in POSITIONS_KEPT or not _attends_with(text, device_name):
        return None
    return Reason(
        "its attention does not tell flash-attn where a sequence begins, so rows see those packed in front of them",
        "set actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    )


def _uncapped(text: PretrainedConfig, device_name: str) -> Reason | None:
    """Capped scores on a flash-attn 2 that was built without, see ``attention.kernels.capped_scores``."""
    if not attention_needs(text).softcap:
        return None
    if _attends_with(text, device_name) != "flash_attention_2" or kernel_obstacle("flash_attn_2", device_name):
        return None
    found = model_obstacle("flash_attn_2", device_name, attention_needs(text))
    return Reason(f"flash_attn_2 {found}") if found else None
