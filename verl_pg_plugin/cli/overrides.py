"""The doctor's report on a set of overrides: mode, attention kernel, compiled layers and preflight issues."""

from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.utils.device import auto_set_device, get_device_name

from verl_pg_plugin.attention.kernels import ATTENTION_KERNEL, KERNELS, select_kernel
from verl_pg_plugin.cli import FAIL, MODE, OK, WARN, Check, CommandError
from verl_pg_plugin.config.checkpoint import read_checkpoint
from verl_pg_plugin.config.compile import layer_compilation
from verl_pg_plugin.config.engage import add_sections
from verl_pg_plugin.config.keys import ACTOR, OPTIONS, USE_PREFIX_GROUPER, USE_REMOVE_PADDING
from verl_pg_plugin.config.mode import Mode, mode_of
from verl_pg_plugin.config.old_log_prob import separate_forward_reasons
from verl_pg_plugin.config.options import force_add
from verl_pg_plugin.config.preflight import preflight
from verl_pg_plugin.config.rollout import rollout_parts, summary
from verl_pg_plugin.config.rules import engine_of
from verl_pg_plugin.mixers.attention import attention_needs


def compose_config(overrides: list[str], folder: str = "", name: str = "") -> DictConfig:
    """Compose the config that an entry point would run: ours, which matches verl's, or one in another folder."""
    config_dir = Path(folder or Path(__file__).parents[1] / "config/hydra").absolute()
    try:
        with initialize_config_dir(str(config_dir), version_base=None):
            config = compose(name or "pg_ppo_trainer", overrides=[*map(force_add, overrides)])
        add_sections(config)
        OmegaConf.resolve(config.copy())
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: prefix_grouper=null
        override = getattr(error, "override", None)  # set if it cannot be parsed
        message = " ".join(str(error).split()) + "; for ~ write $HOME" * ("~" in (override or "")[1:])
        raise CommandError(f"cannot parse the override {override}: {message}" if override else message) from error
    if "actor_rollout_ref" not in config or "enable" not in (config.get("critic") or ()):
        raise CommandError(f"{name or 'this'} is no config of a PPO trainer: it has no actor_rollout_ref or no critic")
    auto_set_device(config)
    return config


def run_lines(config: DictConfig, *, asks_verl: bool = True) -> list[Check]:
    """Report mode, attention kernel, compiled layers, rollouts and all issues of preflight."""
    mode, device, hf_config = mode_of(config), get_device_name(), read_checkpoint(config)[0]
    issues = preflight(config, asks_verl=asks_verl)
    flags = ", ".join(f"{key}={OmegaConf.select(config, key)}" for key in (USE_PREFIX_GROUPER, USE_REMOVE_PADDING))
    lines = [Check(OK, MODE, f"{mode.value} ({flags})")]
    if not mode.shares_prefixes:
        lines = [Check(WARN, MODE, f"{mode.value}, which shares nothing ({flags})", f"{USE_PREFIX_GROUPER}=True")]
    if mode.shares_prefixes and not any(ATTENTION_KERNEL in issue.setting for issue in issues):
        needs = attention_needs(hf_config.get_text_config()) if hf_config else None
        lines += selected_kernel(device, OmegaConf.select(config, f"{OPTIONS}.attention_kernel", default="auto"), needs)
    engine = engine_of(config, ACTOR, hf_config)
    if mode is Mode.PACKED and hf_config and engine.option("compile_layers") is not None:
        compiles, why = layer_compilation(engine)
        lines.append(Check(OK, "compiled layers", f"{'yes' if compiles else 'no'} ({why})"))
    if mode.shares_prefixes:
        lines.append(Check(OK, "rollouts", summary(rollout_parts(config))))
        reasons = separate_forward_reasons(config) or ["none by the configuration, they are those of the update"]
        lines += [Check(OK, "separate forward for old log-probs", reason) for reason in reasons]
    for issue in issues:
        status = WARN if issue.is_warning else FAIL
        lines.append(Check(status, "settings", f"{issue.where}: {issue.why}", issue.fix))
    return lines


def selected_kernel(device: str, setting: str = "auto", needs: Any = None) -> list[Check]:
    """Report the kernel that packed mode selects on a device, or why it selects none; [] without such a device."""
    if device == "cuda" and not torch.cuda.is_available():
        return []  # reported as a missing GPU
    try:
        kernel = select_kernel(setting, device, needs)
    except RuntimeError as error:
        fix = KERNELS["flash_attn_2"].install if setting == "auto" else f"{ATTENTION_KERNEL}=auto"
        return [Check(FAIL, "attention kernel", str(error), fix)]
    return [Check(OK, "attention kernel", f"{kernel.name} ({kernel.reason})")]
