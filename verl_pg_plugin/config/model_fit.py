"""Options that must fit the model they are given to; asked before Ray starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.architecture import HEAD_COMES_LAST
from verl_pg_plugin.config.mode import USE_REMOVE_PADDING
from verl_pg_plugin.config.violation import Setting, Violation

__all__ = ["unfit_options"]

CRITIC_MODEL = "critic.model"
_ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")


def unfit_options(config: DictConfig, section: str, hf_config: Any) -> Iterator[Violation]:
    """Sequence-parallel sizes that do not divide the heads, and fused kernels for a head they do not replace.

    Args:
        config: the composed trainer config, in a mode that shares prefixes.
        section: the model's section, ``actor_rollout_ref.model`` or ``critic.model``.
        hf_config: config of its checkpoint, overrides applied.
    """
    of_critic = section == CRITIC_MODEL
    text = hf_config.get_text_config()
    # A config of the checkpoint's own may name them otherwise; verl asks again when it builds the model.
    num_heads = getattr(text, "num_attention_heads", 0)
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    for role in ("critic",) if of_critic else _ROLES:
        key = f"{role}.ulysses_sequence_parallel_size"
        sp_size = OmegaConf.select(config, key) or 1
        if num_heads and not _spreads(num_heads, num_kv_heads, sp_size):
            fitting = max(size for size in range(1, sp_size) if _spreads(num_heads, num_kv_heads, size))
            why = f"{num_heads} query and {num_kv_heads} key/value heads cannot be spread over {sp_size} ranks"
            yield Violation("ulysses_heads", (Setting(key, sp_size),), why, f"{key}={fitting}")
    fused = f"{section}.use_fused_kernels"
    packed = OmegaConf.select(config, USE_REMOVE_PADDING)
    if packed and not of_critic and OmegaConf.select(config, fused) and hf_config.model_type not in HEAD_COMES_LAST:
        why = (
            f"model type {hf_config.model_type} is not known to return its head's output as it is; known are "
            f"{', '.join(sorted(HEAD_COMES_LAST))}"
        )
        yield Violation("fused_kernels_model", (Setting(fused, True),), why, f"{fused}=False")


def _spreads(num_heads: int, num_kv_heads: int, sp_size: int) -> bool:
    """Each rank gets as many query heads, and key/value heads of its own or whole copies of one."""
    return num_heads % sp_size == 0 and (num_kv_heads % sp_size == 0 or sp_size % num_kv_heads == 0)
