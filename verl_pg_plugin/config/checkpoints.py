"""Are the checkpoints there, and can their architectures share prefixes?

Neither the hub nor code of a checkpoint's own is asked: what is not on this machine, the workers find out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, PretrainedConfig
from verl.utils.model import update_model_config

from verl_pg_plugin.architectures import OVERRIDE, architecture_issues
from verl_pg_plugin.config.keys import CRITIC_MODEL, MODEL, USE_PREFIX_GROUPER
from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.issue import Issue

HERE = ("/", ".", "~")
"""How a path of this machine begins, whether there is something or not, and no hub id."""


def read_checkpoint(config: DictConfig, section: str = MODEL) -> tuple[PretrainedConfig | None, list[Issue]]:
    """Config of the local or cached checkpoint of a model section, overrides applied, and what is wrong with it.

    The config is None where there is none on this machine, or none that can be read without code of the checkpoint's
    own. The architecture counts only in the modes that share prefixes.
    """
    path, shares = str(OmegaConf.select(config, f"{section}.path")), mode_of(config).shares_prefixes
    if path.startswith(HERE) and not Path(path).is_dir():
        tilde = " (verl does not expand ~)" if path.startswith("~") else ""
        fix = f"{section}.path=<folder written by save_pretrained, or a hub id>{tilde}"
        return None, [Issue(f"{section}.path={path}", "no such folder", fix)]
    key = f"{section}.{'hf_config_path' if OmegaConf.select(config, f'{section}.hf_config_path') else 'path'}"
    folder = source = str(OmegaConf.select(config, key))
    setting = f"{key}={source}"
    if not (source.startswith(HERE) or Path(source).is_dir()):
        try:
            config_json = try_to_load_from_cache(source, "config.json")
        except HFValidationError:  # hdfs://, s3://
            return None, []
        if not isinstance(config_json, str):
            return None, []
        folder = str(Path(config_json).parent)
    if not Path(folder, "config.json").is_file():
        fix = f"{section}.path=<folder written by save_pretrained>"
        return None, [Issue(setting, "the folder has no config.json", fix)]
    trusted = bool(OmegaConf.select(config, f"{section}.trust_remote_code"))
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        entry = OmegaConf.select(config, f"{section}.override_config")  # applied as verl's HFModelConfig applies it
        overrides: Any = OmegaConf.to_container(entry, resolve=True) if isinstance(entry, DictConfig) else {}
        update_model_config(hf_config, override_config_kwargs=overrides.get("model_config", overrides))
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:  # of overrides that do not fit it too
        if not shares or trusted or OmegaConf.select(config, f"{section}.external_lib"):
            return None, []  # code of the user's own may read it, in the workers
        why = f"transformers cannot read its config.json: {str(error).strip().partition(chr(10))[0]}"
        fix = f"repair {folder}/config.json, or {section}.trust_remote_code=True if you trust it"
        return None, [Issue(setting, why, fix)]
    if not shares:
        return hf_config, []
    if len(hf_config.architectures or ()) != 1:
        why = f"verl wants exactly one entry under architectures, config.json has {hf_config.architectures}"
        fix = f'write "architectures": ["<its model class>"] into {folder}/config.json'
        return hf_config, [Issue(setting, why, fix)]
    own, issues = f"{section}.override_config", []
    for issue in architecture_issues(hf_config, trusted, value_model=section == CRITIC_MODEL):
        fix = issue.fix.replace(OVERRIDE, own) or f"another checkpoint, or {USE_PREFIX_GROUPER}=False (stock verl)"
        issues.append(Issue(issue.setting.replace(OVERRIDE, own) or setting, issue.why, fix))
    return hf_config, issues
