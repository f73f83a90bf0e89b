"""What a set of overrides would select, and everything that would reject it."""

from __future__ import annotations

from hydra import compose, initialize_config_module
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.utils.device import auto_set_device, get_device_name

from verl_pg_plugin.architectures import rmpad_fault
from verl_pg_plugin.attention.kernels import ATTENTION_KERNEL, KERNELS, select_kernel
from verl_pg_plugin.cli.command import CommandError
from verl_pg_plugin.cli.doctor.report import Problem, Section
from verl_pg_plugin.cli.doctor.sharing import sharing_model
from verl_pg_plugin.config.compile import COMPILE_LAYERS, layer_compilation
from verl_pg_plugin.config.engage import add_sections
from verl_pg_plugin.config.keys import ACTOR, OPTIONS, USE_PREFIX_GROUPER, USE_REMOVE_PADDING
from verl_pg_plugin.config.mode import Mode, mode_of
from verl_pg_plugin.config.preflight import preflight
from verl_pg_plugin.config.rules import engine_of
from verl_pg_plugin.mixers.attention import attention_needs

__all__ = ["compose_config", "settings"]


def compose_config(overrides: list[str]) -> DictConfig:
    """The config that an entry point would run with these overrides: ours, or verl's where they are written for it.

    verl's own config has no section ``prefix_grouper``, so there an option can be added with a ``+``; ``++`` does so
    there and overrides in ours, which comes to the same.

    Raises:
        CommandError: an override that Hydra cannot parse or apply, or an interpolation that leads nowhere.
    """
    try:
        if any(override.startswith(f"+{OPTIONS}.") for override in overrides):
            with initialize_config_module("verl.trainer.config", version_base=None):
                config = compose("ppo_trainer", overrides=overrides)
            add_sections(config)
        else:
            with initialize_config_module("verl_pg_plugin.config.hydra", version_base=None):
                config = compose("pg_ppo_trainer", overrides=overrides)
        OmegaConf.resolve(config.copy())
    except OverrideParseException as error:
        raise CommandError(f"cannot parse the override {error.override}: {' '.join(str(error).split())}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise CommandError(" ".join(str(error).split())) from error
    auto_set_device(config)
    return config


def settings(config: DictConfig) -> Section:
    """Mode, attention kernel, and everything that an entry point would say against the run."""
    mode = mode_of(config)
    issues = preflight(config)
    rows = [
        ("mode", f"{mode.value} ({_value(config, USE_PREFIX_GROUPER)}, {_value(config, USE_REMOVE_PADDING)})"),
        ("trainer", f"V1, mode {config.trainer.v1.trainer_mode}" if config.trainer.use_v1 else "V0"),
        ("strategy of the actor", str(OmegaConf.select(config, "actor_rollout_ref.actor.strategy"))),
    ]
    problems = [Problem(f"{issue.setting}: {issue.why}", issue.fix, issue.is_warning) for issue in issues]
    if mode is Mode.RMPAD:
        problems += _stock_fault(config)
    if not mode.shares_prefixes:
        rows.append(("attention", f"stock verl's; {USE_PREFIX_GROUPER}=True shares prefixes"))
    elif not any(issue.key == ATTENTION_KERNEL for issue in issues):
        asked, hf_config = OmegaConf.select(config, ATTENTION_KERNEL, default="auto"), sharing_model(config)
        needs = attention_needs(hf_config.get_text_config()) if hf_config else None
        try:
            kernel = select_kernel(asked, get_device_name(), needs)
        except RuntimeError as error:
            rows.append(("attention kernel", "none"))
            if asked != "auto":
                problems.append(Problem(str(error), f"++{ATTENTION_KERNEL}=auto"))
            elif needs and needs.softcap:  # what auto misses for any model is reported as a problem of the machine
                problems.append(Problem(str(error), KERNELS["flash_attn_2"].install))
        else:
            rows.append(("attention kernel", f"{kernel.name} ({kernel.reason})"))
    if mode is Mode.PACKED:
        rows.append(("compiled layers of the actor", _compiled_layers(config)))
        rows.append(("activations of the actor", _activations(config)))
    return Section("With these overrides", tuple(rows), tuple(problems))


def _activations(config: DictConfig) -> str:
    """What the backward of the actor finds kept."""
    if not OmegaConf.select(config, "actor_rollout_ref.model.enable_gradient_checkpointing", default=False):
        return "all kept, no gradient checkpointing"
    asked = OmegaConf.select(config, f"{OPTIONS}.activations", default="auto")
    kept = "layers' inputs are kept" if asked == "inputs" else "layers' inputs and attention's outputs are kept"
    return f"{kept} ({OPTIONS}.activations={asked})"


def _compiled_layers(config: DictConfig) -> str:
    asked = OmegaConf.select(config, COMPILE_LAYERS, default="auto")
    hf_config = sharing_model(config)
    if asked == "auto" and hf_config is None:
        return f"{COMPILE_LAYERS}=auto: known with a local checkpoint of transformers' own"
    compiles, reason = layer_compilation(engine_of(config, ACTOR, hf_config))
    return f"{'yes' if compiles else 'no'} ({reason})"


def _stock_fault(config: DictConfig) -> list[Problem]:
    hf_config = sharing_model(config)
    fault = rmpad_fault(hf_config, get_device_name()) if hf_config else None
    return [Problem(fault.why, fault.fix)] if fault else []


def _value(config: DictConfig, key: str) -> str:
    return f"{key}={OmegaConf.select(config, key)}"
