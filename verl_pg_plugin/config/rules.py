"""What runs that share prefixes cannot do: one function for each rule, ``None`` where nothing is wrong.

All look at one engine. ``RULES`` are asked before Ray starts and when the engine is built, ``PREFLIGHT_RULES`` before
Ray alone: the engine finds out by itself.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.device import get_device_name
from verl.utils.torch_dtypes import PrecisionType

from verl_pg_plugin.architectures import (
    FLOAT32_ANGLE_TYPES,
    fsdp2_recomputes_as_it_ran,
    fused_obstacle,
    text_skeleton,
)
from verl_pg_plugin.attention.kernels import ATTENTION_KERNEL, KERNELS, AttentionNeeds, setting_obstacle
from verl_pg_plugin.config.compile import COMPILE_LAYERS, compiler_obstacle, has_flat_parameters, layers_obstacle
from verl_pg_plugin.config.keys import ACTOR, CRITIC, OPTIONS, REF, USE_PREFIX_GROUPER, VEOMNI
from verl_pg_plugin.config.mode import SP_SIZE, Engine, Mode
from verl_pg_plugin.issue import Issue
from verl_pg_plugin.mixers import MIXERS, count_layers
from verl_pg_plugin.mixers.attention import attention_needs
from verl_pg_plugin.modalities import modality_obstacles, modality_of

STOCK = f"{USE_PREFIX_GROUPER}=False (stock verl)"
TORN_BY_TOKENS = "dynamic micro-batches are cut by token count, through the middle of a group"
REPLACED_ATTENTION = ("sdpa", "flash_attention_2")
"""Attention implementations that attention over shared prefixes stands in for."""

NOT_RUN = "has not been run with shared prefixes"
VEOMNI_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose files of VeOmni's are held to every sequence alone."""
VEOMNI_SETTINGS: dict[str, tuple[Any, str]] = {
    "expert_parallel_size": (1, f"expert parallelism needs several GPUs, on which it {NOT_RUN}"),
    "router_replay.mode": ("disabled", f"router replay {NOT_RUN}"),
    "qat_implementation": ("none", "quantization-aware training is not verified with shared prefixes"),
    "enable_fsdp_offload": (False, f"VeOmni's offload of weights {NOT_RUN}"),
    "enable_async_activation_offload": (False, "levels of prefix_grouper.activations stand in for it"),
}
"""What settings of VeOmni's engine config must be, and why they can be nothing else."""


def check_engine(engine_config: Any, model_config: Any) -> None:
    """Pass where an engine can share prefixes under its configs.

    Args:
        engine_config: a ``PrefixGrouperEngineConfig``.
        model_config: verl's ``HFModelConfig``.

    Raises:
        ValueError: one line with the settings, the cause and the fix of each error.
    """
    engine = Engine.of(engine_config, model_config)
    if found := [issue for rule in RULES if (issue := rule(engine))]:
        listing = "; ".join(f"{issue.setting}: {issue.why} (fix: {issue.fix})" for issue in found)
        raise ValueError(f"use_prefix_grouper=True: {listing}; or set {USE_PREFIX_GROUPER}=False")


def engine_of(config: DictConfig, role: str, hf_config: Any = None) -> Engine:
    """The engine that verl will build for a role, as the trainer's config describes it.

    Args:
        config: the composed trainer config.
        role: ``ACTOR``, ``REF`` or ``CRITIC``.
        hf_config: of its checkpoint, if it could be read.
    """
    strategy = OmegaConf.select(config, f"{role}.strategy")
    engine = Engine(role, {"strategy": strategy}, {}, get_device_name(), hf_config)
    section: Any = OmegaConf.select(config, engine.section)
    found: Any = OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else {}
    sp_key = f"{engine.section}.{engine.sp_name}"
    if role != CRITIC:
        # verl lets this deprecated key win above 1, and ignores the critic's, and under VeOmni this one too.
        size = None if engine.on_veomni else OmegaConf.select(config, f"{role}.{SP_SIZE}")
        sp_key = f"{role}.{SP_SIZE}" if isinstance(size, int) and size > 1 else sp_key
        dynamic = f"{role}.use_dynamic_bsz" if role == ACTOR else f"{role}.log_prob_use_dynamic_bsz"
        found["use_dynamic_bsz"] = OmegaConf.select(config, dynamic)
        found["pad_to_length"] = found.get("pad_to_length") or OmegaConf.select(config, f"{role}.pad_to_length")
    found |= {
        "strategy": strategy,
        engine.sp_name: OmegaConf.select(config, sp_key),
        "use_prefix_grouper": OmegaConf.select(config, USE_PREFIX_GROUPER),
        OPTIONS: OmegaConf.select(config, OPTIONS),
    }
    return replace(engine, config=found, model=OmegaConf.select(config, engine.model_section), sp_key=sp_key)


def roles_of(config: DictConfig) -> list[str]:
    """Sections of the roles whose engines the run will have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's ``need_critic`` has one that is meant for one call
        critic = need_critic(config)
    return [ACTOR, *([REF] if need_reference_policy(config) else []), *([CRITIC] if critic else [])]


def multi_token_prediction(engine: Engine) -> Issue | None:
    if not (engine.of_model("mtp.enable") and engine.trains):  # verl switches it off for the reference policy
        return None
    why = "multi-token prediction heads read several tokens ahead, across the fork of a group"
    return Issue(engine.model_setting("mtp.enable"), why, f"{engine.model_section}.mtp.enable=False")


def quantization_aware_training(engine: Engine) -> Issue | None:
    """verl reads it from the engine's section alone; ``actor.qat`` does nothing under FSDP."""
    if not engine.get("qat.enable"):
        return None
    key = f"{engine.section}.qat.enable"
    return Issue(f"{key}=True", "quantization-aware training is not verified with shared prefixes", f"{key}=False")


def compiled_layers(engine: Engine) -> Issue | None:
    return _uncompiled(layers_obstacle(engine)) if engine.option("compile_layers") is True else None


def compiler(engine: Engine) -> Issue | None:
    if engine.option("compile_layers") is not True:
        return None
    return _uncompiled(compiler_obstacle(engine.device, has_flat_parameters(engine)))


def _uncompiled(why: str) -> Issue | None:
    return Issue(f"{COMPILE_LAYERS}=True", why, f"++{COMPILE_LAYERS}=False") if why else None


def _fuses(engine: Engine) -> bool:
    return engine.mode is Mode.PACKED and engine.role != CRITIC and bool(engine.of_model("use_fused_kernels"))


def fused_kernels(engine: Engine) -> Issue | None:
    """verl's fused kernels stand in for a head that comes last; of a class of the checkpoint's own the engine knows."""
    if not _fuses(engine):
        return None
    known = type(engine.hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING
    why = fused_obstacle(text_skeleton(engine.hf_config)) if known else ""
    key = f"{engine.model_section}.use_fused_kernels"
    return Issue(f"{key}=True", why, f"{key}=False") if why else None


def fused_backend(engine: Engine) -> Issue | None:
    if not _fuses(engine):
        return None
    name, why = engine.of_model("fused_kernel_options.impl_backend"), ""
    if name not in ("torch", "triton", "liger"):
        why = "is unknown to this plugin; the back ends are torch, triton and liger"
    elif name != "torch" and engine.device != "cuda":
        why = f"needs a GPU, this machine's device is {engine.device!r}"
    elif name == "liger" and importlib.util.find_spec("liger_kernel") is None:
        why = "needs the package liger-kernel, which is not installed, and verl would take torch instead"
    key = f"{engine.model_section}.fused_kernel_options.impl_backend"
    return Issue(f"{key}={name}", f"impl_backend={name} {why}", f"{key}=torch") if why else None


def ulysses(engine: Engine) -> Issue | None:
    size = engine.sp_size
    if size == 1 or engine.mode is not Mode.PACKED or engine.hf_config is None:
        return None
    text = engine.hf_config.get_text_config()

    def obstacles(ranks: int) -> list[str]:
        found = [(mixer.name, mixer.ulysses_obstacle(text, ranks)) for mixer in _mixers(text)]
        return [f"{name} layers of {text.model_type}: {why}" for name, why in found if why]

    if not (found := obstacles(size)):
        return None
    most = max(ranks for ranks in range(1, size) if ranks == 1 or not obstacles(ranks))
    return Issue(f"{engine.sp_key}={size}", "; ".join(found), f"{engine.sp_key}={most}")


def gradient_checkpointing(engine: Engine) -> Issue | None:
    kind, key = getattr(engine.hf_config, "model_type", ""), f"{engine.model_section}.enable_gradient_checkpointing"
    if not engine.of_model("enable_gradient_checkpointing"):
        return None
    known = type(engine.hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING  # of a class of the checkpoint's own verl finds out
    if known and not MODEL_FOR_CAUSAL_LM_MAPPING[type(engine.hf_config)].supports_gradient_checkpointing:
        return Issue(f"{key}=True", f"transformers has no gradient checkpointing for {kind}", f"{key}=False")
    casts = engine.get("strategy") == "fsdp2" and not _is_float32(engine.get("mixed_precision.param_dtype"))
    if not (engine.trains and casts and kind in FLOAT32_ANGLE_TYPES) or fsdp2_recomputes_as_it_ran():
        return None
    why = (
        f"FSDP2 of torch {torch.__version__} recomputes layers of {kind} with rotary angles of another dtype than "
        "their forward had, so that the first update fails, in stock verl too"
    )
    fix = f"{key}=False, or {engine.role}.strategy=fsdp, or pip install 'torch>=2.13'"
    return Issue(f"{key}=True", why, fix)


def activation_offload(engine: Engine) -> Issue | None:
    """A level of ours stands in for verl's offload, and levels are what checkpointed layers keep."""
    key = f"{engine.model_section}.enable_activation_offload"
    if not engine.of_model("enable_activation_offload") or engine.of_model("enable_gradient_checkpointing"):
        return None
    why = "without gradient checkpointing layers keep everything on the device, and nothing is offloaded"
    fix = f"{engine.model_section}.enable_gradient_checkpointing=True, or {key}=False"
    return Issue(f"{key}=True", why, fix, is_warning=True)


def mixer_kernels(engine: Engine) -> Issue | None:
    if engine.hf_config is None or engine.mode is not Mode.PACKED:
        return None
    mixers = _mixers(engine.hf_config.get_text_config())
    lacking = [obstacle for mixer in mixers for obstacle in mixer.machine_obstacles(engine.device)]
    setting = f"{engine.model_section}.path={engine.of_model('path')}"
    return Issue(setting, "; ".join(lacking), f"install what it names, or {STOCK}") if lacking else None


def image_encoder_attention(engine: Engine) -> Issue | None:
    """Layers of the text model get this plugin's attention, an image encoder the one that was asked for."""
    if engine.hf_config is None or engine.mode is not Mode.PACKED or modality_obstacles(engine.hf_config):
        return None
    asked = engine.of_model("override_config.attn_implementation") or "flash_attention_2"  # verl's default
    runs = engine.device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    if asked != "flash_attention_2" or runs or not modality_of(engine.hf_config).encoders:
        return None
    key = f"{engine.model_section}.override_config.attn_implementation"
    why = (
        f"the vision encoder of {engine.hf_config.model_type} would run {asked}, verl's default, which needs a GPU and "
        f"flash-attn; this machine's device is {engine.device!r}"
    )
    return Issue(f"{key}={asked}", why, f"++{key}=sdpa")


def padded_groups(engine: Engine) -> Issue | None:
    """A padded group must reach the model whole and in order; packed mode does all of this."""
    if engine.mode is not Mode.PADDED_GROUPS:
        return None
    broken: list[tuple[str, str]] = []
    unpadded = engine.model_setting("use_remove_padding")
    if engine.role == CRITIC and engine.get("use_dynamic_bsz") is not False:
        broken.append((unpadded, "verl cuts the critic's micro-batches by tokens, which padded groups do not support"))
    elif engine.role != CRITIC and engine.get("use_dynamic_bsz"):
        key = f"{engine.role}.{'log_prob_' if engine.role == REF else ''}use_dynamic_bsz"
        broken.append((f"{key}=True", TORN_BY_TOKENS))
    if engine.of_model("use_fused_kernels"):
        why = "the LM head runs on columns of padded groups and would bypass verl's fused one"
        broken.append((engine.model_setting("use_fused_kernels"), why))
    if engine.sp_size > 1:
        why = "sequence parallelism would cut padded groups at shard edges"
        broken.append((f"{engine.sp_key}={engine.sp_size}", why))
    if engine.get("pad_to_length"):
        why = "the length of padded groups follows from the longest one"
        broken.append((f"{engine.section}.pad_to_length=True", why))
    if engine.option("verify") not in (None, "off"):
        why = "padded groups have no tokens of a sample alone to compare with"
        broken.append((f"{OPTIONS}.verify={engine.option('verify')}", why))
    if engine.hf_config is not None:
        kind, mixers = engine.hf_config.model_type, _mixers(engine.hf_config.get_text_config())
        if bound := [mixer.name for mixer in mixers if not mixer.padded_groups]:
            broken.append((unpadded, f"{', '.join(bound)} layers of {kind} share packed tokens only"))
        elif not modality_obstacles(engine.hf_config) and modality_of(engine.hf_config).encoders:
            broken.append((unpadded, f"{kind} reads images, which padded groups do not hold"))
    return not_padded(broken, engine.model_section) if broken else None


def padded_library(engine: Engine) -> Issue | None:
    if engine.mode is not Mode.PADDED_GROUPS or importlib.util.find_spec("prefix_grouper") is not None:
        return None
    why = "padded groups are made by upstream's library, which is not installed"
    packed = f"{engine.model_section}.use_remove_padding=True (packed mode)"
    return Issue(engine.model_setting("use_remove_padding"), why, f"pip install prefix_grouper, or {packed}")


def attention_kernel(engine: Engine) -> Issue | None:
    """No kernel that the setting stands for is here, or none computes the model."""
    asked = engine.option("attention_kernel") or "auto"
    if asked not in ("auto", *KERNELS):
        return None  # the option itself is refused
    needs = AttentionNeeds() if engine.hf_config is None else attention_needs(engine.hf_config.get_text_config())
    why = setting_obstacle(asked, engine.device, needs)
    if not why:
        return None
    fits = asked != "auto" and not setting_obstacle("auto", engine.device, needs)
    return Issue(f"{ATTENTION_KERNEL}={asked}", why, f"++{ATTENTION_KERNEL}={'auto' if fits else 'sdpa'}, or {STOCK}")


def attn_implementation(engine: Engine) -> Issue | None:
    asked = engine.of_model("override_config.attn_implementation")
    if asked in (None, *REPLACED_ATTENTION):
        return None
    key = f"{engine.model_section}.override_config.attn_implementation"
    why = f"attention over shared prefixes replaces {' and '.join(REPLACED_ATTENTION)}; this one is left out too"
    return Issue(f"{key}={asked}", why, f"++{key}=sdpa", is_warning=True)


def veomni(engine: Engine) -> Issue | None:
    """What verl's VeOmni engine would run, and nobody has held to every sequence alone."""
    if not engine.on_veomni:
        return None
    broken: list[tuple[str, str, str]] = []
    kind = getattr(engine.hf_config, "model_type", VEOMNI_TYPES[0])
    if engine.role == CRITIC:
        broken.append((f"{CRITIC}.strategy={VEOMNI}", f"a critic on VeOmni {NOT_RUN}", "model_engine=dp"))
    if kind not in VEOMNI_TYPES:
        why = f"of VeOmni's models {', '.join(VEOMNI_TYPES)} share prefixes, and {kind} {NOT_RUN}"
        broken.append((engine.model_setting("path"), why, "model_engine=dp"))
    if engine.mode is Mode.PADDED_GROUPS:
        why, key = f"VeOmni {NOT_RUN} in padded groups", f"{engine.model_section}.use_remove_padding"
        broken.append((f"{key}=False", why, f"{key}=True"))
    if engine.of_model("lora_rank"):
        why = "verl's VeOmni engine has no LoRA and would train the whole model"
        broken.append((engine.model_setting("lora_rank"), why, f"{engine.model_section}.lora_rank=0"))
    for name, (proven, why) in VEOMNI_SETTINGS.items():
        if (asked := engine.get(name)) not in (proven, None):
            key = f"{engine.section}.{name}"
            broken.append((f"{key}={asked}", why, f"{key}={proven}"))
    if not broken:
        return None
    settings, causes, fixes = zip(*broken, strict=True)
    return Issue(", ".join(settings), "; ".join(causes), " ".join(fixes))


def veomni_package(engine: Engine) -> Issue | None:
    if not engine.on_veomni or importlib.util.find_spec("veomni") is not None:
        return None
    why = "verl's VeOmni engine needs the package veomni, which is not installed"
    return Issue(f"{engine.role}.strategy={VEOMNI}", why, "pip install veomni, or model_engine=dp")


def _mixers(text_config: Any) -> list[Any]:
    return [MIXERS[name] for name in count_layers(text_config)]


def _is_float32(dtype: Any) -> bool:
    return dtype is not None and PrecisionType.is_fp32(dtype)


def not_padded(broken: list[tuple[str, str]], model_section: str) -> Issue:
    """Settings that padded groups do not run with, each with its cause, as one issue."""
    settings, causes = ", ".join(setting for setting, _ in broken), "; ".join(dict.fromkeys(why for _, why in broken))
    fix = f"{model_section}.use_remove_padding=True (packed mode, which supports it), or leave the settings out"
    return Issue(settings, causes, fix)


EngineRule = Callable[[Engine], Issue | None]
RULES: tuple[EngineRule, ...] = (
    veomni,
    veomni_package,
    multi_token_prediction,
    quantization_aware_training,
    compiled_layers,
    compiler,
    fused_kernels,
    fused_backend,
    ulysses,
    gradient_checkpointing,
    mixer_kernels,
    image_encoder_attention,
    padded_groups,
    padded_library,
)
PREFLIGHT_RULES: tuple[EngineRule, ...] = (attention_kernel, attn_implementation, activation_offload)
MACHINE_RULES: tuple[EngineRule, ...] = (
    attention_kernel,
    compiler,
    fused_backend,
    image_encoder_attention,
    mixer_kernels,
    padded_library,
    veomni_package,
)
"""What they find on this machine is no more than a warning where the run's machines are others."""
