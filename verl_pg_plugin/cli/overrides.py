"""What the doctor says of a set of overrides: what they select, what an entry point would object to, what is split."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.utils.device import auto_set_device, get_device_name

from verl_pg_plugin.architectures import rmpad_fault, text_skeleton
from verl_pg_plugin.attention.kernels import ATTENTION_KERNEL, KERNELS, select_kernel
from verl_pg_plugin.cli import FAIL, MODE, OK, WARN, Check, CommandError
from verl_pg_plugin.config.compile import COMPILE_LAYERS, layer_compilation
from verl_pg_plugin.config.engage import add_sections
from verl_pg_plugin.config.keys import ACTOR, MODEL, OPTIONS, REF, ROLLOUT, USE_PREFIX_GROUPER, USE_REMOVE_PADDING
from verl_pg_plugin.config.machine import count_of, read_checkpoint
from verl_pg_plugin.config.mode import Engine, Mode, mode_of
from verl_pg_plugin.config.options import added
from verl_pg_plugin.config.preflight import micro_batch_limits, preflight
from verl_pg_plugin.config.rules import engine_of
from verl_pg_plugin.engine.activations import host_bytes
from verl_pg_plugin.layout import Sequences
from verl_pg_plugin.mixers.attention import attention_needs
from verl_pg_plugin.planning.activation_level import DEVICE_RESERVE, Levels
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.planning.forecast import batch_of_lengths, forecast
from verl_pg_plugin.planning.memory import TokenBytes, WeightBytes


def compose_config(overrides: list[str], folder: str = "", name: str = "") -> DictConfig:
    """The config that an entry point would run: of verl's, which comes to the same as ours, or of one with a folder."""
    place = Path(folder or Path(__file__).parents[1] / "config/hydra").absolute()
    try:
        with initialize_config_dir(str(place), version_base=None):
            config = compose(name or "pg_ppo_trainer", overrides=[*map(added, overrides)])
        add_sections(config)
        OmegaConf.resolve(config.copy())
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # the last: Hydra's of prefix_grouper=null
        override = getattr(error, "override", None)  # of one that cannot be parsed
        message = " ".join(str(error).split()) + "; for ~ write $HOME" * ("~" in (override or "")[1:])
        raise CommandError(f"cannot parse the override {override}: {message}" if override else message) from error
    if "actor_rollout_ref" not in config or "enable" not in (config.get("critic") or ()):
        raise CommandError(f"{name or 'this'} is no config of a PPO trainer: it has no actor_rollout_ref or no critic")
    auto_set_device(config)
    return config


def run_lines(config: DictConfig, *, asks_verl: bool = True) -> list[Check]:
    """Mode, attention kernel, compiled layers, activations, and everything that an entry point would say."""
    mode, device, hf_config = mode_of(config), get_device_name(), read_checkpoint(config)[0]
    issues = preflight(config, asks_verl=asks_verl)
    flags = ", ".join(f"{key}={OmegaConf.select(config, key)}" for key in (USE_PREFIX_GROUPER, USE_REMOVE_PADDING))
    lines = [Check(OK, MODE, f"{mode.value} ({flags})")]
    if not mode.shares_prefixes:
        lines = [Check(WARN, MODE, f"{mode.value}, which shares nothing ({flags})", f"{USE_PREFIX_GROUPER}=True")]
    if mode is Mode.RMPAD and hf_config and (fault := rmpad_fault(hf_config, device)):
        issues = [*issues, fault]
    if mode.shares_prefixes and not any(ATTENTION_KERNEL in issue.setting for issue in issues):
        needs = attention_needs(hf_config.get_text_config()) if hf_config else None
        lines += taken_kernel(device, OmegaConf.select(config, f"{OPTIONS}.attention_kernel", default="auto"), needs)
    engine = engine_of(config, ACTOR, hf_config)
    known = engine.option("activations") and not any(issue.setting.startswith(f"++{OPTIONS}.") for issue in issues)
    if mode is Mode.PACKED and known:  # engines of others have no such option
        levels = _levels(engine)
        text = ", ".join(level.value for level in levels.ladder)
        if levels.asked is None:
            text = f"++{OPTIONS}.activations=auto: the first that fits of {text}"
        lines += [_compiled_line(engine), Check(OK, "activations", text)]
    for issue in issues:
        fix = issue.fix or f"another {MODEL}.path, or {USE_PREFIX_GROUPER}=False (stock verl)"
        lines.append(Check(WARN if issue.is_warning else FAIL, "settings", f"{issue.where}: {issue.why}", fix))
    return lines


def _compiled_line(engine: Engine) -> Check:
    """A warning where a compiler or one setting is all that keeps ``auto`` from compiling the layers."""
    if engine.hf_config is None:
        known = f"{COMPILE_LAYERS}={engine.option('compile_layers')}: known with a local checkpoint"
        return Check(OK, "compiled layers", known)
    on, reason = layer_compilation(engine)
    auto = {OPTIONS: {**engine.config[OPTIONS], "compile_layers": "auto"}}
    fsdp2 = {} if engine.on_veomni else {"strategy": "fsdp2"}  # VeOmni's models are others
    by_auto, by_fsdp2 = (replace(engine, config={**engine.config, **change}) for change in (auto, fsdp2))
    ways = {
        f"{ACTOR}.strategy=fsdp2": layer_compilation(by_fsdp2),
        f"{COMPILE_LAYERS}=True": layer_compilation(by_auto),
        "do what it says": layer_compilation(engine, any_machine=True),
    }
    fix = next((fix for fix, (compiles, _) in ways.items() if compiles), "")
    if on or not fix:
        return Check(OK, "compiled layers", f"{'yes' if on else 'no'} ({reason})")
    return Check(WARN, "compiled layers", f"no, an update may take 1.2x to 1.5x as long ({reason})", fix)


def group_lines(config: DictConfig) -> list[Check]:
    """Whether micro-batches of each phase hold the longest group that the overrides allow, and memory of its update."""
    keys = "data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.n"
    prompt, response, n = (count_of(config, key) for key in keys)
    if not (prompt and response and n):
        return []  # of which verl speaks
    tokens, alone = prompt - 1 + n * response, n * (prompt + response)
    text = f"{n} responses of {response} tokens to a prompt of {prompt}: {tokens} tokens, alone {alone}"
    lines, mode = [Check(OK, "tokens", text)], mode_of(config)
    if not mode.shares_prefixes:
        return lines
    if n == 1:
        lines = [Check(WARN, "tokens", f"{text}; only equal beginnings of prompts are shared", f"{ROLLOUT}.n=<more>")]
    hf_config, _ = read_checkpoint(config)
    carries = mode is Mode.PACKED and OmegaConf.select(config, f"{OPTIONS}.carry") != "never"
    phases = {ROLLOUT: "old_log_prob", ACTOR: "update", REF: "ref"}
    for section, key, by_tokens in micro_batch_limits(config):
        phase, most, size = phases.get(section), count_of(config, key), n
        if not (phase and most):
            continue  # a critic, or a number of which preflight speaks
        asked = f"{key}={most}"
        if by_tokens:
            most, size = most * engine_of(config, REF if phase == "ref" else ACTOR).sp_size, tokens
        whole = "stays whole where memory holds it, else it " if by_tokens and phase == "update" else ""
        split = f"{asked} is less than it takes: it {whole}is split into chunks"
        if by_tokens and (most < prompt - 1 + response or mode is not Mode.PACKED):
            continue  # of which preflight speaks
        if size <= most:
            lines.append(Check(OK, phase, f"{asked} holds it whole"))
        elif carries:
            lines.append(Check(OK, phase, f"{split}, which read the prefix KV cache of earlier ones"))
        else:
            fix = f"++{OPTIONS}.carry=auto" if mode is Mode.PACKED else f"{key}={size}"
            lines.append(Check(WARN, phase, f"{split} that each compute the prompt again", fix))
        if by_tokens and phase == "update":
            lines += _memory_lines(config, hf_config, batch_of_lengths([prompt], [[response] * n]), most, carries)
    return lines


def _memory_lines(config: DictConfig, hf_config: Any, group: Sequences, budget: int, carries: bool) -> list[Check]:
    """What the update of a group takes of this machine's GPU and host, by the bytes that the engine counts with."""
    engine = engine_of(config, ACTOR, hf_config)
    nodes, per_node = count_of(config, "trainer.nnodes"), count_of(config, "trainer.n_gpus_per_node")
    sizes = TokenBytes.of(hf_config.get_text_config(), compiled=layer_compilation(engine)[0]) if hf_config else None
    known = sizes and nodes and per_node and engine.option("activations")
    if not known or engine.device != "cuda" or not torch.cuda.is_available():
        return []
    module = text_skeleton(hf_config).requires_grad_(not engine.of_model("lora_rank"))
    chunk, gpus = count_of(config, f"{OPTIONS}.logits_chunk_size"), nodes * per_node
    weights = WeightBytes.of(
        module,
        min(count_of(config, f"{engine.section}.fsdp_size") or gpus, gpus),
        chunk,
        keeps_weights=engine.get("reshard_after_forward") is False,
        keeps_gradients=bool(engine.get("use_no_sync_for_gradient_accumulation")),
    )
    host = host_bytes() / per_node
    if engine.get("strategy") == "fsdp2" and engine.get("offload_policy"):  # verl's own offload is out then
        host -= weights.weights + weights.gradients + weights.optimizer
        weights = replace(weights, weights=0.0, gradients=0.0, optimizer=0.0)
    else:  # verl brings weights and AdamW's state back for an update
        host -= weights.weights if engine.get("param_offload") else 0.0
        host -= weights.optimizer if engine.get("optimizer_offload") else 0.0
    total = torch.cuda.get_device_properties(0).total_memory
    fused, room = bool(engine.of_model("use_fused_kernels")), weights.room(total, host)
    heads = {"logits_at_once": not (chunk or fused), "fused_kernels": fused}
    levels = _levels(engine, sizes=sizes, room=room, ranks=engine.sp_size, **heads)
    found = forecast(group, ModelFlops.of(module), levels, budget, carry=carries)
    peak, has = found.peak_gib(weights), total / 2**30
    text = f"{found.level.value}: {peak:.1f} of {has:.1f} GiB on the device, {found.host_gib:.1f} on the host"
    if peak <= (1 - DEVICE_RESERVE) * has and found.host_gib <= max(host, 0.0) / 2**30:
        return [Check(OK, "memory of the update", text)]
    return [Check(WARN, "memory of the update", text, "it will hardly fit: more GPUs, or a Ulysses group")]


def _levels(engine: Engine, **facts: Any) -> Levels:
    """Those that the settings allow."""
    return Levels.of_settings(
        engine.option("activations"),
        engine.of_model("enable_gradient_checkpointing"),
        host_alone=bool(engine.of_model("enable_activation_offload")),
        **facts,
    )


def taken_kernel(device: str, asked: str = "auto", needs: Any = None) -> list[Check]:
    """The kernel that packed mode takes on a device, or why it takes none; where there is no such device, nothing."""
    if device == "cuda" and not torch.cuda.is_available():
        return []  # which fails in a line of its own
    try:
        kernel = select_kernel(asked, device, needs)
    except RuntimeError as error:
        fix = KERNELS["flash_attn_2"].install if asked == "auto" else f"{ATTENTION_KERNEL}=auto"
        return [Check(FAIL, "attention kernel", str(error), fix)]
    return [Check(OK, "attention kernel", f"{kernel.name} ({kernel.reason})")]
