"""Options that must fit the model they are given to; asked before Ray starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.architectures.checks import HEAD_COMES_LAST
from verl_pg_plugin.config.mode import USE_REMOVE_PADDING, mode_of
from verl_pg_plugin.config.rule import CRITIC, REF, Rule
from verl_pg_plugin.config.rule_parts import ACTOR, SHARING
from verl_pg_plugin.config.violation import Setting, Violation

__all__ = ["effective_sp_size", "sequence_parallel_key", "unfit_options"]

CRITIC_MODEL = "critic.model"
_SP_SIZE = "ulysses_sequence_parallel_size"


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
    if num_heads:
        heads = Rule(
            "ulysses_heads",
            SHARING,
            tuple(sequence_parallel_key(config, role) for role in ((CRITIC,) if of_critic else (ACTOR, REF))),
            lambda sp_size, config: not _spreads(num_heads, num_kv_heads, sp_size or 1),
            f"{num_heads} query and {num_kv_heads} key/value heads cannot be spread over so many ranks",
            lambda settings, config: " ".join(
                f"{setting.key}={_next_smaller(num_heads, num_kv_heads, setting.value)}" for setting in settings
            ),
        )
        if violation := heads.violation(config, mode_of(config)):
            yield violation
    fused = f"{section}.use_fused_kernels"
    packed = OmegaConf.select(config, USE_REMOVE_PADDING)
    if packed and not of_critic and OmegaConf.select(config, fused) and hf_config.model_type not in HEAD_COMES_LAST:
        why = (
            f"model type {hf_config.model_type} is not known to return its head's output as it is; known are "
            f"{', '.join(sorted(HEAD_COMES_LAST))}"
        )
        yield Violation("fused_kernels_model", (Setting(fused, True),), why, f"{fused}=False")


def sequence_parallel_key(config: DictConfig, role: str) -> str:
    """Where the Ulysses size of a role is taken from: verl lets its deprecated key win for the actor and the ref."""
    if role == CRITIC:
        return f"{role}.fsdp.{_SP_SIZE}"
    deprecated = f"{role}.{_SP_SIZE}"
    return deprecated if (OmegaConf.select(config, deprecated) or 1) > 1 else f"{role}.fsdp_config.{_SP_SIZE}"


def effective_sp_size(config: DictConfig, role: str) -> int:
    """Ranks that share the rows of a role's micro-batch: Ulysses sequence parallelism."""
    return OmegaConf.select(config, sequence_parallel_key(config, role)) or 1


def _next_smaller(num_heads: int, num_kv_heads: int, sp_size: int) -> int:
    return max(size for size in range(1, sp_size) if _spreads(num_heads, num_kv_heads, size))


def _spreads(num_heads: int, num_kv_heads: int, sp_size: int) -> bool:
    """Each rank gets as many query heads, and key/value heads of its own or whole copies of one."""
    return num_heads % sp_size == 0 and (num_kv_heads % sp_size == 0 or sp_size % num_kv_heads == 0)
