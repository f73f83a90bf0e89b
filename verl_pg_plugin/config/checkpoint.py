"""Read the config of a run's checkpoint and check that its architecture can share prefixes."""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, PretrainedConfig
from verl.utils.model import update_model_config

from verl_pg_plugin.architectures import OVERRIDE, architecture_issues
from verl_pg_plugin.config.keys import CRITIC_MODEL, MODEL, USE_PREFIX_GROUPER
from verl_pg_plugin.issue import Issue


def read_checkpoint(config: DictConfig, section: str = MODEL) -> tuple[PretrainedConfig | None, list[Issue]]:
    """Return the config of a model section's checkpoint, overrides applied, and the issues of its architecture.

    Only local files are read and no checkpoint code runs. The config is None if that does not suffice.
    """
    key = f"{section}.{'hf_config_path' if OmegaConf.select(config, f'{section}.hf_config_path') else 'path'}"
    source, own = str(OmegaConf.select(config, key)), f"{section}.override_config"
    try:
        hf_config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        entry = OmegaConf.select(config, own)  # applied as verl's HFModelConfig applies it
        overrides: Any = OmegaConf.to_container(entry, resolve=True) if isinstance(entry, DictConfig) else {}
        if "model_config" in overrides:
            own, overrides = f"{own}.model_config", overrides["model_config"]
        update_model_config(hf_config, override_config_kwargs=overrides)
    except Exception:  # config classes may raise anything; verl's workers read it again and report the error
        return None, []
    issues = []
    trusted = bool(OmegaConf.select(config, f"{section}.trust_remote_code"))
    for issue in architecture_issues(hf_config, trusted, value_model=section == CRITIC_MODEL):
        fix = issue.fix.replace(OVERRIDE, own) or f"another checkpoint, or {USE_PREFIX_GROUPER}=False (stock verl)"
        issues.append(Issue(issue.setting.replace(OVERRIDE, own) or f"{key}={source}", issue.why, fix))
    return hf_config, issues
