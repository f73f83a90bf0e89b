"""The configs of an engine, made from the trainer's config as verl's workers and its V1 trainer make them."""

from __future__ import annotations

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
    model = omega_conf_to_dataclass({**_resolved(config, role.model), "load_tokenizer": False})
    section = _resolved(config, role.value)
    del section["profiler"]
    if role is Role.CRITIC:
        model.model_type = "value_model"
        return omega_conf_to_dataclass({**section, "model": None}).engine, model
    if role is Role.REF:
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
            section[f"ppo_{name}"] = section.pop(f"log_prob_{name}")
        section["use_dynamic_bsz"] = section.pop("log_prob_use_dynamic_bsz")
        model.mtp = MtpConfig(enable=False)
    engine = omega_conf_to_dataclass(section).engine
    engine.use_dynamic_bsz = section["use_dynamic_bsz"]
    return engine, model


def _resolved(config: DictConfig, key: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.select(config, key), resolve=True)
