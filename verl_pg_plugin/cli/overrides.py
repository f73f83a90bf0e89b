"""What the doctor says of a set of overrides: what they select, what an entry point would object to, what is split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.device import auto_set_device, get_device_name

from verl_pg_plugin.architectures import rmpad_fault, text_skeleton
from verl_pg_plugin.attention.kernels import ATTENTION_KERNEL, KERNELS, select_kernel
from verl_pg_plugin.cli import FACT, FAIL, OK, WARN, CommandError, Line, Section
from verl_pg_plugin.config.checkpoints import read_hf_config
from verl_pg_plugin.config.compile import COMPILE_LAYERS, layer_compilation
from verl_pg_plugin.config.engage import add_sections
from verl_pg_plugin.config.keys import ACTOR, MODEL, OPTIONS, REF, ROLLOUT, USE_PREFIX_GROUPER, USE_REMOVE_PADDING
from verl_pg_plugin.config.mode import Mode, mode_of
from verl_pg_plugin.config.preflight import preflight
from verl_pg_plugin.config.rules import engine_of
from verl_pg_plugin.engine.room import host_bytes
from verl_pg_plugin.layout import build_prefix_order
from verl_pg_plugin.mixers import MIXERS, count_layers
from verl_pg_plugin.mixers.attention import attention_needs
from verl_pg_plugin.planning.activation_level import Level, Levels
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.planning.forecast import Batch, Settings, forecast
from verl_pg_plugin.planning.memory import TokenBytes, WeightBytes
from verl_pg_plugin.planning.micro_batches import MicroBatchLimits, cut_micro_batches

CONFIGS = "verl_pg_plugin.config.hydra"


def sections(config: DictConfig) -> Iterator[Section]:
    """The report's sections about a composed config."""
    yield "With these overrides", run_lines(config)
    yield "Longest group", group_lines(config)


def compose_config(overrides: list[str]) -> DictConfig:
    """The config that an entry point would run with these overrides: ours, or verl's where they are written for it.

    verl's own config has no section ``prefix_grouper``, so there an option can be added with a ``+``; ``++`` does so
    there and overrides in ours, which comes to the same.

    Raises:
        CommandError: an override that Hydra cannot parse or apply, or an interpolation that leads nowhere.
    """
    stock = any(override.startswith(f"+{OPTIONS}.") for override in overrides)
    try:
        with initialize_config_module("verl.trainer.config" if stock else CONFIGS, version_base=None):
            config = compose("ppo_trainer" if stock else "pg_ppo_trainer", overrides=overrides)
        if stock:
            add_sections(config)
        OmegaConf.resolve(config.copy())
    except (HydraException, OmegaConfBaseException) as error:
        override = getattr(error, "override", None)  # of one that cannot be parsed
        message = " ".join(str(error).split())
        raise CommandError(f"cannot parse the override {override}: {message}" if override else message) from error
    auto_set_device(config)
    return config


def run_lines(config: DictConfig) -> list[Line]:
    """Mode, attention kernel, compiled layers, activations, and everything that an entry point would say."""
    mode, device, hf_config, issues = mode_of(config), get_device_name(), read_hf_config(config), preflight(config)
    flags = ", ".join(f"{key}={OmegaConf.select(config, key)}" for key in (USE_PREFIX_GROUPER, USE_REMOVE_PADDING))
    shares = "" if mode.shares_prefixes else f"; {USE_PREFIX_GROUPER}=True shares prefixes"
    lines = [Line(OK if mode.shares_prefixes else FACT, "mode", f"{mode.value} ({flags}{shares})")]
    if mode is Mode.RMPAD and hf_config and (fault := rmpad_fault(hf_config, device)):
        issues = [*issues, fault]
    if mode.shares_prefixes and not any(ATTENTION_KERNEL in issue.setting for issue in issues):
        needs = attention_needs(hf_config.get_text_config()) if hf_config else None
        lines += taken_kernel(device, OmegaConf.select(config, ATTENTION_KERNEL, default="auto"), needs)
    if mode is Mode.PACKED and not any(issue.setting.startswith(f"{OPTIONS}.") for issue in issues):
        lines += [_compiled_line(config, hf_config), _activations_line(config)]
    for issue in issues:
        fix = issue.fix or f"another {MODEL}.path, or {USE_PREFIX_GROUPER}=False (stock verl)"
        text = f"{issue.setting}: {issue.why}" if issue.setting else issue.why
        lines.append(Line(WARN if issue.is_warning else FAIL, "settings", text, fix))
    return lines


def _compiled_line(config: DictConfig, hf_config: Any) -> Line:
    engine = engine_of(config, ACTOR, hf_config)
    if hf_config is None:
        asked = engine.option("compile_layers")
        return Line(FACT, "compiled layers", f"{COMPILE_LAYERS}={asked}: known with a local checkpoint")
    on, reason = layer_compilation(engine)
    if on or engine.device != "cuda":
        return Line(OK, "compiled layers", f"{'yes' if on else 'no'} ({reason})")
    lora = engine.get("strategy") == "fsdp" and engine.of_model("lora_rank")
    fix = f"{ACTOR}.strategy=fsdp2" if lora else f"++{COMPILE_LAYERS}=True, where the reason allows it"
    return Line(WARN, "compiled layers", f"no, an update may take 1.2x to 1.5x as long ({reason})", fix)


def _activations_line(config: DictConfig) -> Line:
    asked = OmegaConf.select(config, f"{OPTIONS}.activations", default="auto")
    if not OmegaConf.select(config, f"{MODEL}.enable_gradient_checkpointing", default=False):
        return Line(OK, "activations", "all: no gradient checkpointing")
    if asked != "auto":
        return Line(OK, "activations", f"{asked} ({OPTIONS}.activations={asked})")
    offloads = OmegaConf.select(config, f"{MODEL}.enable_activation_offload", default=False)
    first = f"attention_on_host ({MODEL}.enable_activation_offload=True)" if offloads else "attention"
    levels = f"the first that fits of {first}{'' if offloads else ', attention_on_host'} and inputs_on_host"
    return Line(OK, "activations", f"{OPTIONS}.activations=auto: {levels}")


def _memory_lines(config: DictConfig, batch: Batch, hf_config: Any) -> list[Line]:
    """Level, device and host memory of an update that holds the longest group, on this machine's GPU."""
    engine = engine_of(config, ACTOR, hf_config)
    budget = OmegaConf.select(config, f"{ACTOR}.ppo_max_token_len_per_gpu")
    by_tokens = OmegaConf.select(config, f"{ACTOR}.use_dynamic_bsz") and type(budget) is int
    if engine.device != "cuda" or not torch.cuda.is_available() or not by_tokens or hf_config is None:
        return []
    module = text_skeleton(hf_config)
    sizes = TokenBytes.of(hf_config.get_text_config(), compiled=layer_compilation(engine)[0])
    budget, total = budget * engine.sp_size, torch.cuda.get_device_properties(0).total_memory
    if sizes is None or batch.lengths.max() > budget:
        return []
    num_gpus = OmegaConf.select(config, "trainer.nnodes") * OmegaConf.select(config, "trainer.n_gpus_per_node")
    weights, asked = WeightBytes.of(module, num_gpus), engine.option("activations")
    level = None if asked == "auto" else Level(asked)
    levels = Levels(
        level if engine.of_model("enable_gradient_checkpointing") else Level.ALL,
        sizes,
        weights.room(total, host_bytes() / OmegaConf.select(config, "trainer.n_gpus_per_node")),
        bool(engine.of_model("enable_activation_offload")),
        ranks=engine.sp_size,
    )
    found = forecast(batch, ModelFlops.of(module), Settings(budget, levels=levels))
    peak, has = found.peak_gib(weights), total / 2**30
    text = f"{found.level.value}: {peak:.1f} of {has:.1f} GiB on the device, {found.host_gib:.1f} GiB on the host"
    if peak > has:
        return [Line(WARN, "memory of the update", f"{text}; it will hardly fit", "more GPUs, or a Ulysses group")]
    return [Line(OK, "memory of the update", text)]


def group_lines(config: DictConfig) -> list[Line]:
    """Whether the micro-batches of each phase hold the longest group that the overrides allow, or how they split it."""

    def count(key: str) -> int:
        value = OmegaConf.select(config, key)
        return value if type(value) is int and value > 0 else 0

    prompt, response, n = map(count, ("data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.n"))
    if not (prompt and response and n):
        return []  # of which verl speaks
    batch = Batch.of_lengths([prompt], [[response] * n])
    order, alone = build_prefix_order(batch.tokens, batch.offsets), n * (prompt + response)
    text = f"{n} responses of {response} tokens to a prompt of {prompt}: {order.num_new.sum()} tokens, alone {alone}"
    lines = [Line(FACT, "tokens", text)]
    if mode_of(config) is not Mode.PACKED:
        return lines
    hf_config = read_hf_config(config)
    cannot = [m for m in count_layers(hf_config.get_text_config()) if not MIXERS[m].prefix_cache] if hf_config else []
    carries = OmegaConf.select(config, f"{OPTIONS}.carry") != "never" and not cannot
    roles = [("update", ACTOR, ACTOR, "ppo_", ""), ("old_log_prob", ROLLOUT, ACTOR, "log_prob_", "log_prob_")]
    roles += [("ref", REF, REF, "log_prob_", "log_prob_")] if need_reference_policy(config) else []
    lines += _memory_lines(config, batch, hf_config)
    for phase, section, role, kind, switch in roles:
        by_tokens = bool(OmegaConf.select(config, f"{section}.{switch}use_dynamic_bsz"))
        key = f"{section}.{kind}{'max_token_len_per_gpu' if by_tokens else 'micro_batch_size_per_gpu'}"
        most = count(key) * (engine_of(config, role).sp_size if by_tokens else 1)
        if not most:
            continue  # of which preflight speaks
        asked = f"{key}={count(key)}"
        if by_tokens and most < order.num_tokens.max():
            lines.append(Line(WARN, phase, f"{asked} does not hold the longest sequence", f"{key}=<more>"))
            continue
        limits = MicroBatchLimits(max_tokens=most) if by_tokens else MicroBatchLimits(max_sequences=most)
        parts = len(cut_micro_batches(order, limits))
        if parts == 1:
            lines.append(Line(OK, phase, f"{asked} holds it whole"))
        elif carries:
            text = f"{asked} splits it into some {parts} chunks, which read the prefix KV cache of earlier ones"
            lines.append(Line(OK, phase, text))
        else:
            why = f" ({', '.join(cannot)} layers have no prefix KV cache)" if cannot else ""
            text = f"{asked} splits it into {parts} chunks that each compute the prompt again{why}"
            lines.append(Line(WARN, phase, text, f"{key}=<more>" if cannot else f"++{OPTIONS}.carry=auto"))
    return lines


def taken_kernel(device: str, asked: str = "auto", needs: Any = None) -> list[Line]:
    """The kernel that packed mode takes on a device, or why it takes none; where there is no such device, nothing."""
    if device == "cuda" and not torch.cuda.is_available():
        return []  # which fails in a line of its own
    try:
        kernel = select_kernel(asked, device, needs)
    except RuntimeError as error:
        fix = KERNELS["flash_attn_2"].install if asked == "auto" else f"++{ATTENTION_KERNEL}=auto"
        return [Line(FAIL, "attention kernel", str(error), fix)]
    return [Line(OK, "attention kernel", f"{kernel.name} ({kernel.reason})")]
