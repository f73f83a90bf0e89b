"""The configs of an engine, made from the trainer's config as verl's workers and its V1 trainer make them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config.model import MtpConfig

from verl_pg_plugin.config.facts import Role


def engine_configs(config: DictConfig, role: Role) -> tuple[Any, Any]:
    """Engine config and model config of a role's engine.

    ``verl.workers.engine_workers.ActorRolloutRefWorker.init_model`` for the actor and the reference policy,
    ``verl.trainer.ppo.v1.trainer_base`` for the critic; no tokenizer is loaded.
    """
    resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    for model in (resolved.actor_rollout_ref.model, resolved.critic.model):
        OmegaConf.update(model, "load_tokenizer", False, force_add=True)
    if role is Role.CRITIC:
        critic = omega_conf_to_dataclass(resolved.critic)
        critic.model.model_type = "value_model"
        return critic.engine, critic.model
    model = omega_conf_to_dataclass(resolved.actor_rollout_ref.model)
    section = resolved.actor_rollout_ref[role.name.lower()]
    if role is Role.REF:
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
            section[f"ppo_{name}"] = section.pop(f"log_prob_{name}")
        section.use_dynamic_bsz = section.pop("log_prob_use_dynamic_bsz")
        model = deepcopy(model)
        model.mtp = MtpConfig(enable=False)
    engine = omega_conf_to_dataclass(section).engine
    engine.use_dynamic_bsz = section.use_dynamic_bsz
    return engine, model
