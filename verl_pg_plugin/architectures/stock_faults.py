"""What stock verl is known to compute wrongly, told where the plugin is loaded and leaves a run to it."""

from __future__ import annotations

from transformers import PretrainedConfig

from verl_pg_plugin.mixers import MIXERS, count_layers
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
    """Why stock verl's rmpad mode computes a model wrongly, and what to set instead; None if nothing is known.

    Args:
        hf_config: of the checkpoint, with the ``attn_implementation`` that verl loads it with; without one it is
            flash-attn, which is verl's default.
    """
    text = hf_config.get_text_config()
    for cause in (_carries_states(hf_config, device_name), _attends_across(text, device_name)):
        if cause:
            return Reason(f"stock verl's rmpad mode computes {hf_config.model_type} wrongly: {cause}", PACKED_AS_RMPAD)
    return None


def _carries_states(hf_config: PretrainedConfig, device_name: str) -> str:
    """Recurrent layers that run from sequence to sequence.

    verl 0.9.1 lays sequences one after the other and tells attention where each begins, but not the recurrence: from
    the second sequence on, its layers start from the state of the one before. Tiny models with random weights are off
    by 0.30 (Qwen3-Next), 0.35 (Qwen3.5, text) and 0.31 (Qwen3.5, multimodal) in a log-prob. verl's own forward of
    multimodal Qwen3.5 does tell fla's kernels, which transformers' fallback ignores (by its source; not run on a GPU).
    """
    config = hf_config.get_text_config()
    if not count_layers(config)[GATED_DELTA] or MIXERS[GATED_DELTA].obstacles(config):
        return ""
    if hf_config.model_type in MULTIMODAL_MODEL_TYPES and device_name == "cuda" and has_fla():
        return ""
    return (
        "its Gated DeltaNet layers carry the state of each sequence into the next, so log-probs and gradients depend "
        "on what else a micro-batch holds"
    )


def _attends_across(text: PretrainedConfig, device_name: str) -> str:
    """Attention that sees the sequences packed in front of its own: a tiny Ministral 3 on an H200 was off by 10%."""
    implementation = text._attn_implementation or "flash_attention_2"
    if text.model_type not in POSITIONS_KEPT or device_name != "cuda" or "flash" not in implementation:
        return ""
    return (
        "its attention does not tell flash-attn where a sequence begins, so rows see those packed in front of them; "
        "actor_rollout_ref.model.override_config.attn_implementation=sdpa does"
    )
