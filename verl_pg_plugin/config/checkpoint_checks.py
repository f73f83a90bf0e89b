"""Are the checkpoints complete, and can their architectures share prefixes? Asked before Ray starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.import_utils import import_external_libs
from verl.utils.model import update_model_config

from verl_pg_plugin.architectures.checks import unsupported_reasons
from verl_pg_plugin.config.facts import Facts, Role, runs_critic
from verl_pg_plugin.config.keys import CRITIC_MODEL, MODEL, USE_PREFIX_GROUPER
from verl_pg_plugin.config.mixer_rules import MIXER_RULES
from verl_pg_plugin.config.modality_rules import MODALITY_RULES
from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.config.model_rules import MODEL_RULES
from verl_pg_plugin.config.rule import violations
from verl_pg_plugin.config.violation import Setting, Violation

VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "tokenization_*.py",
)


def roles_of(config: DictConfig) -> list[Role]:
    """Whose engines the run will have."""
    present = {Role.REF: need_reference_policy(config), Role.CRITIC: runs_critic(config)}
    return [role for role in Role if present.get(role, True)]


def checkpoint_violations(config: DictConfig) -> list[Violation]:
    """Problems of the local checkpoints that ``config`` names, the actor's and the critic's if there is one.

    Of a hub id that is in the cache the architecture is looked at; other hub ids and hdfs paths are left to the
    workers, which download them. The architecture counts only in the modes that share prefixes.
    """
    found = _violations_of(config, MODEL)
    same = OmegaConf.select(config, f"{CRITIC_MODEL}.path") == OmegaConf.select(config, f"{MODEL}.path")
    if runs_critic(config) and not (same and found):
        found += _violations_of(config, CRITIC_MODEL)
    return found


def _violations_of(config: DictConfig, section: str) -> list[Violation]:
    """Problems of the checkpoint that one model section names."""
    key = f"{section}.path"
    path = str(OmegaConf.select(config, key))
    if not is_local(path):
        return list(_architecture(config, section, path)) if local_checkpoint(path) else []
    if not Path(path).is_dir():
        expanded = Path(path).expanduser()
        fix = (
            f"{key}={expanded} (verl does not expand ~)"
            if path.startswith("~") and expanded.is_dir()
            else f"{key}=<folder written by save_pretrained, or a hub id>"
        )
        return [_violation("checkpoint_path", key, path, "no such folder", fix)]
    return [*_tokenizer(config, section, path), *_architecture(config, section, path)]


def _tokenizer(config: DictConfig, section: str, path: str) -> Iterator[Violation]:
    key, folder = optional_folder(config, section, "tokenizer_path", path)
    if folder == path and not Path(folder, "config.json").is_file():
        return  # no checkpoint at all, which is said once
    if not is_local(folder) or any(any(Path(folder).glob(name)) for name in VOCABULARY_FILES):
        return
    yield _violation(
        "checkpoint_tokenizer",
        key,
        folder,
        "the folder has no tokenizer (tokenizer.json, tokenizer.model, vocab.json, ...)",
        f"save one there with tokenizer.save_pretrained(...), or set {section}.tokenizer_path=<folder or hub id>",
    )


def _architecture(config: DictConfig, section: str, path: str) -> Iterator[Violation]:
    key, source = optional_folder(config, section, "hf_config_path", path)
    folder = local_checkpoint(source)
    if folder is None:
        return
    if not Path(folder, "config.json").is_file():
        fix = f"{section}.path=<folder written by save_pretrained>"
        yield _violation("checkpoint_config", key, folder, "the folder has no config.json", fix)
        return
    if not mode_of(config).shares_prefixes:
        return
    trust_remote_code = bool(OmegaConf.select(config, f"{section}.trust_remote_code", default=False))
    import_external_libs(OmegaConf.select(config, f"{section}.external_lib"))
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        why = f"transformers cannot read its config.json: {str(error).strip().splitlines()[0]}"
        fix = f"repair {folder}/config.json, or {section}.trust_remote_code=True if you trust the code in it"
        yield _violation("checkpoint_config", key, folder, why, fix)
        return
    if len(hf_config.architectures or ()) != 1:
        why = f"verl wants exactly one entry under architectures, config.json has {hf_config.architectures}"
        fix = f'write "architectures": ["<its model class>"] into {folder}/config.json'
        yield _violation("checkpoint_config", key, folder, why, fix)
        return
    update_model_config(hf_config, override_config_kwargs=model_overrides(config, section))
    reasons = unsupported_reasons(hf_config, trust_remote_code, value_model=section == CRITIC_MODEL)
    for reason in reasons:
        fix = reason.fix.replace(MODEL, section) or f"another checkpoint, or {USE_PREFIX_GROUPER}=False (stock verl)"
        name, value = reason.field or ("", folder)
        yield _violation("architecture", f"{section}.override_config.{name}" if name else key, value, reason.why, fix)
    if not reasons:
        engines = [Facts.from_hydra(config, role, hf_config) for role in roles_of(config) if role.model == section]
        yield from violations((*MODEL_RULES, *MIXER_RULES, *MODALITY_RULES), engines)


def model_overrides(config: DictConfig, section: str) -> dict[str, Any]:
    """``model.override_config`` as verl's HFModelConfig reads it."""
    entry = OmegaConf.select(config, f"{section}.override_config")
    overrides: dict[str, Any] = OmegaConf.to_container(entry, resolve=True) if entry else {}  # type: ignore[assignment]
    return overrides.get("model_config", overrides)


def optional_folder(config: DictConfig, section: str, name: str, path: str) -> tuple[str, str]:
    """Key and value of an optional path that defaults to the checkpoint's."""
    own = OmegaConf.select(config, f"{section}.{name}")
    return (f"{section}.{name}", str(own)) if own else (f"{section}.path", path)


def is_local(path: str) -> bool:
    """Whether a path is one of this machine's, there or not, and no hub id."""
    return path.startswith(("/", ".", "~")) or Path(path).is_dir()


def local_checkpoint(path: str) -> str | None:
    """Folder of a checkpoint on this machine: the path itself, or that of a hub id in the cache; else None."""
    if is_local(path):
        return path
    try:
        config_json = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # hdfs://, s3://
        return None
    return str(Path(config_json).parent) if isinstance(config_json, str) else None


def _violation(rule: str, key: str, value: Any, why: str, fix: str) -> Violation:
    return Violation(rule, (Setting(key, value),), why, fix)
