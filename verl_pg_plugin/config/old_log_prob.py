"""Decide from a run's config whether its updates provide old log-probs, or a separate forward computes them."""

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo import core_algos

from verl_pg_plugin.config.keys import ACTOR, OLD_LOG_PROB, OPTIONS, USE_PREFIX_GROUPER, count_of
from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.config.rules import engine_of

CORRECTION = "algorithm.rollout_correction"

_READERS = {
    "algorithm.use_kl_in_reward": "the KL in the reward reads them",
    f"{CORRECTION}.bypass_mode": "they are those of the rollout",
    f"{CORRECTION}.rollout_is": "importance weights read them",
    f"{CORRECTION}.rollout_rs": "rejection sampling reads them",
    f"{ACTOR}.calculate_sum_pi_squared": "advantages read them",
    f"{ACTOR}.shuffle": "the update has another order of sequences",
    "algorithm.use_pf_ppo": "the update gets other samples of the batch",
    "distillation.enabled": "a distillation loss may need no log-probs",
}
"""Settings that need old log-probs before the update, and why."""

_TRAINERS = "sync", "colocate_async"
"""verl's V1 trainers that compute old log-probs with the weights of the update."""


def separate_forward_reasons(config: DictConfig) -> list[str]:
    """Return why old log-probs need a separate forward, one line each; [] if the update provides them."""
    if not mode_of(config).shares_prefixes:
        return [f"{USE_PREFIX_GROUPER}={OmegaConf.select(config, USE_PREFIX_GROUPER)}"]
    if (option := OmegaConf.select(config, f"{OPTIONS}.old_log_prob", default="auto")) != "auto":
        return [f"{OLD_LOG_PROB}={option}"]
    actor = engine_of(config, ACTOR)
    if not str(target := actor.get("_target_")).startswith("verl_pg_plugin."):
        return [f"{actor.section}._target_={target}: this engine's updates do not provide them"]
    values = {key: OmegaConf.select(config, key) for key in _READERS}
    reasons = [f"{key}={value}: {_READERS[key]}" for key, value in values.items() if value]
    batch, prompts = (count_of(config, key) for key in ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"))
    if not batch:
        reasons.append(f"data.train_batch_size={batch}: a batch may have several mini-batches")
    elif batch != prompts:
        reasons.append(f"{ACTOR}.ppo_mini_batch_size={prompts}: a batch of {batch} prompts has several mini-batches")
    if (epochs := count_of(config, f"{ACTOR}.ppo_epochs")) > 1:
        reasons.append(f"{ACTOR}.ppo_epochs={epochs}: later epochs read them")
    loss_mode = OmegaConf.select(config, f"{ACTOR}.policy_loss.loss_mode") or "vanilla"
    if getattr(core_algos.POLICY_LOSS_REGISTRY.get(loss_mode), "__module__", "") != core_algos.__name__:
        reasons.append(f"{ACTOR}.policy_loss.loss_mode={loss_mode}: this loss is not verl's")
    elif loss_mode == "kl_cov":
        reasons.append(f"{ACTOR}.policy_loss.loss_mode=kl_cov: its penalty has no gradient where the ratio is 1")
    trainer = OmegaConf.select(config, "trainer.v1.trainer_mode")
    if OmegaConf.select(config, "trainer.use_v1") and trainer not in _TRAINERS:
        reasons.append(f"trainer.v1.trainer_mode={trainer}: its weights may differ from those of the update")
    if actor.get("router_replay.mode") == "R2":
        reasons.append(f"{actor.section}.router_replay.mode=R2: their forward records the experts")
    return reasons
