"""What runs that share prefixes cannot do: one function for each rule, which yields an issue for all that is wrong.

All look at one engine. They are asked before Ray starts and when the engine is built.
"""

import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.device import get_device_name
from verl.utils.torch_dtypes import PrecisionType

from verl_pg_plugin.attention.kernels import (
    ATTENTION_KERNEL,
    ATTENTION_KERNELS,
    KERNELS,
    AttentionNeeds,
    candidates,
    setting_obstacle,
)
from verl_pg_plugin.config.compile import (
    COMPILE_LAYERS,
    compiler_obstacle,
    has_flat_parameters,
    layers_obstacle,
    untested_type,
)
from verl_pg_plugin.config.keys import ACTOR, CRITIC, MODEL, OPTIONS, REF, USE_PREFIX_GROUPER, VEOMNI, count_of
from verl_pg_plugin.config.mode import SP_SIZE, Engine, Mode
from verl_pg_plugin.gradient_checkpointing import FLOAT32_ANGLE_TYPES, FSDP2_CASTS_AGAIN
from verl_pg_plugin.issue import Issue
from verl_pg_plugin.lm_head import fused_obstacle
from verl_pg_plugin.mixers import MIXERS, count_layers
from verl_pg_plugin.mixers.attention import attention_needs
from verl_pg_plugin.mixers.mixer import Mixer
from verl_pg_plugin.modalities import modality_of
from verl_pg_plugin.planning.activation_level import Level
from verl_pg_plugin.skeleton import text_skeleton

STOCK = f"{USE_PREFIX_GROUPER}=False (stock verl)"
REPLACED_ATTENTION = ("sdpa", "flash_attention_2")
"""Attention implementations that attention over shared prefixes stands in for."""

QAT_MODE = "w4a16"
NOT_RUN = "has not been run with shared prefixes"
VEOMNI_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose files of VeOmni's are held to every sequence alone."""
VEOMNI_SETTINGS: dict[str, tuple[Any, str]] = {
    "expert_parallel_size": (1, f"expert parallelism needs several GPUs, on which it {NOT_RUN}"),
    "enable_fsdp_offload": (False, f"VeOmni's offload of weights {NOT_RUN}"),
    "enable_async_activation_offload": (False, "levels of ++prefix_grouper.activations stand in for it"),
}
"""What settings of VeOmni's engine config must be, and why they can be nothing else."""


def check_engine(engine_config: Any, model_config: Any) -> None:
    """Raise ValueError where an engine cannot share prefixes: one line with settings, cause and fix of each error."""
    engine = Engine.of(engine_config, model_config)
    if found := [issue for rule in RULES for issue in rule(engine) if not issue.is_warning]:
        listing = "; ".join(f"{issue.setting}: {issue.why} (fix: {issue.fix})" for issue in found)
        of_sft = f"; in verl's SFT trainer the sections are model, +engine and +engine.{OPTIONS}"
        raise ValueError(f"use_prefix_grouper=True: {listing}; or set {USE_PREFIX_GROUPER}=False{of_sft}")


def engine_of(config: DictConfig, role: str, hf_config: Any = None) -> Engine:
    """The engine that verl will build for a role, as the trainer's config describes it."""
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
        found["batches_by_tokens"] = OmegaConf.select(config, dynamic)
        found["pad_to_length"] = found.get("pad_to_length") or OmegaConf.select(config, f"{role}.pad_to_length")
    found |= {
        "strategy": strategy,
        engine.sp_name: OmegaConf.select(config, sp_key),
        "use_prefix_grouper": OmegaConf.select(config, USE_PREFIX_GROUPER),
        OPTIONS: OmegaConf.select(config, OPTIONS),
        "run_ranks": count_of(config, "trainer.nnodes") * count_of(config, "trainer.n_gpus_per_node"),
    }
    return replace(engine, config=found, model=OmegaConf.select(config, engine.model_section), sp_key=sp_key)


def roles_of(config: DictConfig) -> list[str]:
    """Sections of the roles whose engines the run will have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's ``need_critic`` has one that is meant for one call
        critic = need_critic(config)
    ranks = (OmegaConf.select(config, f"{MODEL}.{rank}") for rank in ("lora.rank", "lora_rank"))
    # With an adapter the reference policy is the actor's engine without it.
    adapts = any(ranks) or OmegaConf.select(config, f"{MODEL}.lora_adapter_path") is not None
    ref = need_reference_policy(config) and not adapts
    return [ACTOR, *([REF] if ref else []), *([CRITIC] if critic else [])]


def quantization_aware_training(engine: Engine) -> Iterator[Issue]:
    """verl reads it from the engine's section alone; ``actor.qat`` does nothing under FSDP."""
    key, mode = f"{engine.section}.qat", engine.get("qat.mode")
    if not engine.get("qat.enable"):
        return
    if engine.role == CRITIC or engine.mode is Mode.PADDED_GROUPS:
        why = f"quantization-aware training {NOT_RUN} in a critic or in padded groups"
        yield Issue(f"{key}.enable=True", why, f"{key}.enable=False")
    elif mode not in (None, QAT_MODE):
        why = f"quantization-aware training is verified with shared prefixes for weights alone, {QAT_MODE}"
        yield Issue(f"{key}.mode={mode}", why, f"{key}.mode={QAT_MODE}, or {STOCK}")


def compiled_layers(engine: Engine) -> Iterator[Issue]:
    if engine.option("compile_layers") is not True:
        return
    if why := layers_obstacle(engine):
        yield Issue(f"{COMPILE_LAYERS}=True", why, f"{COMPILE_LAYERS}=False")
    elif engine.device == "cuda" and engine.hf_config is not None and (why := untested_type(engine)):
        yield Issue(f"{COMPILE_LAYERS}=True", why, f"{COMPILE_LAYERS}=auto", is_warning=True)


def compiler(engine: Engine) -> Iterator[Issue]:
    asked = engine.option("compile_layers") is True
    if asked and (why := compiler_obstacle(engine.device, has_flat_parameters(engine))):
        yield Issue(f"{COMPILE_LAYERS}=True", why, f"{COMPILE_LAYERS}=False")


def fused_kernels(engine: Engine) -> Iterator[Issue]:
    """verl's fused kernels stand in for a head that comes last; of a class of the checkpoint's own the engine knows."""
    if not (_fuses(engine) and type(engine.hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING):
        return
    if why := fused_obstacle(text_skeleton(engine.hf_config)):
        key = f"{engine.model_section}.use_fused_kernels"
        yield Issue(f"{key}=True", why, f"{key}=False")


def fused_backend(engine: Engine) -> Iterator[Issue]:
    if not _fuses(engine):
        return
    name, why, replaced = engine.of_model("fused_kernel_options.impl_backend"), "", False
    if name not in ("torch", "triton", "liger"):
        why = "is unknown to this plugin; the back ends are torch, triton and liger"
    elif replaced := name == "liger" and importlib.util.find_spec("liger_kernel") is None:
        why = "needs the package liger-kernel, which is not installed, and verl takes torch instead"
    elif name != "torch" and engine.device != "cuda":
        why = f"needs a GPU, this machine's device is {engine.device!r}"
    if why:
        key = f"{engine.model_section}.fused_kernel_options.impl_backend"
        yield Issue(f"{key}={name}", f"impl_backend={name} {why}", f"{key}=torch", is_warning=replaced)


def ulysses(engine: Engine) -> Iterator[Issue]:
    """The run's ranks are known before Ray alone; verl ends in an IndexError of torch's mesh if they do not divide."""
    size, ranks = engine.sp_size, engine.get("run_ranks") or 0
    found = _ulysses_obstacles(engine, size) if size > 1 else []
    if not found and ranks % size:
        found = [f"{size} ranks that share tokens do not divide the run's {ranks}"]
    if found:
        sizes = (smaller for smaller in range(2, size) if not ranks % smaller)
        fits = max((smaller for smaller in sizes if not _ulysses_obstacles(engine, smaller)), default=1)
        yield Issue(f"{engine.sp_key}={size}", "; ".join(found), f"{engine.sp_key}={fits}")


def gradient_checkpointing(engine: Engine) -> Iterator[Issue]:
    section, kind = engine.model_section, getattr(engine.hf_config, "model_type", "")
    key, offload = f"{section}.enable_gradient_checkpointing", f"{section}.enable_activation_offload"
    casts = engine.get("strategy") == "fsdp2" and not PrecisionType.is_fp32(engine.get("mixed_precision.param_dtype"))
    if not engine.of_model("enable_gradient_checkpointing"):
        activations, asked = f"++{OPTIONS}.activations", engine.option("activations")
        why = "without gradient checkpointing layers keep everything on the device, and nothing is offloaded"
        if engine.of_model("enable_activation_offload"):  # levels of ours stand in for it
            yield Issue(f"{offload}=True", why, f"{key}=True, or {offload}=False", is_warning=True)
        elif asked in {level.value for level in Level} - {"all"}:
            yield Issue(f"{activations}={asked}", why, f"{key}=True, or {activations}=all", is_warning=True)
    elif engine.role != REF and casts and kind in FLOAT32_ANGLE_TYPES and not FSDP2_CASTS_AGAIN:
        why = (
            f"FSDP2 of torch {torch.__version__} recomputes layers of {kind} with rotary angles of another dtype than "
            "their forward had, so that the first update fails, in stock verl too"
        )
        fix = f"{key}=False, or {engine.role}.strategy=fsdp, or pip install 'torch>=2.13'"
        yield Issue(f"{key}=True", why, fix)


def attn_implementation(engine: Engine) -> Iterator[Issue]:
    """Layers of the text model get this plugin's attention, an image encoder the one that was asked for."""
    key = f"{engine.model_section}.override_config.attn_implementation"
    asked = engine.of_model("override_config.attn_implementation") or "flash_attention_2"  # verl's default
    runs = engine.device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    if asked not in REPLACED_ATTENTION:
        why = "attention over shared prefixes runs in its place"
        yield Issue(f"{key}={asked}", why, f"++{key}=sdpa", is_warning=True)
    elif engine.mode is Mode.PACKED and asked == "flash_attention_2" and not runs and _encodes_images(engine):
        why = (
            f"the vision encoder of {engine.hf_config.model_type} would run {asked}, verl's default, which needs a GPU "
            f"and flash-attn; this machine's device is {engine.device!r}"
        )
        yield Issue(f"{key}={asked}", why, f"++{key}=sdpa")


def mixer_kernels(engine: Engine) -> Iterator[Issue]:
    for mixer in _mixers(engine) if engine.mode is Mode.PACKED else ():
        for why in mixer.machine_obstacles(engine.device):
            yield Issue(engine.model_setting("path"), why, f"install what it names, or {STOCK}")


def padded_groups(engine: Engine) -> Iterator[Issue]:
    """A padded group must reach the model whole and in order; packed mode does all of this."""
    if engine.mode is not Mode.PADDED_GROUPS:
        return
    packed = f"{engine.model_section}.use_remove_padding=True (packed mode, which supports it)"
    unpadded = engine.model_setting("use_remove_padding")

    def refuse(setting: str, why: str) -> Issue:
        return Issue(setting, why, f"{packed}, or leave the setting out")

    if engine.role == CRITIC and engine.get("use_dynamic_bsz") is not False:
        yield refuse(unpadded, "verl cuts the critic's micro-batches by tokens, which padded groups do not support")
    elif engine.get("batches_by_tokens"):  # known before Ray alone; SFT's engine configs do not say it
        switch = f"{engine.role}.{'log_prob_' if engine.role == REF else ''}use_dynamic_bsz"
        yield refuse(f"{switch}=True", "dynamic micro-batches are cut by token count, through the middle of a group")
    if engine.of_model("use_fused_kernels"):
        why = "the LM head runs on columns of padded groups and would bypass verl's fused one"
        yield refuse(engine.model_setting("use_fused_kernels"), why)
    if engine.sp_size > 1:
        why = "sequence parallelism would cut padded groups at shard edges"
        yield refuse(f"{engine.sp_key}={engine.sp_size}", why)
    if engine.get("pad_to_length"):
        why = "the length of padded groups follows from the longest one"
        yield refuse(f"{engine.section}.pad_to_length=True", why)
    runs = (mixer for mixer in _mixers(engine) if not mixer.obstacles(engine.hf_config.get_text_config()))
    if packed_only := [mixer.name for mixer in runs if not mixer.padded_groups]:
        why = f"{', '.join(packed_only)} layers of {engine.hf_config.model_type} share packed tokens only"
        yield refuse(unpadded, why)
    if _encodes_images(engine):
        yield refuse(unpadded, f"{engine.hf_config.model_type} reads images, which padded groups do not hold")


def packages(engine: Engine) -> Iterator[Issue]:
    if engine.mode is Mode.PADDED_GROUPS and importlib.util.find_spec("prefix_grouper") is None:
        why = "padded groups are made by upstream's library, which is not installed"
        packed = f"{engine.model_section}.use_remove_padding=True (packed mode)"
        yield Issue(engine.model_setting("use_remove_padding"), why, f"pip install prefix_grouper, or {packed}")
    if engine.on_veomni and importlib.util.find_spec("veomni") is None:
        why = "verl's VeOmni engine needs the package veomni, which is not installed"
        yield Issue(f"{engine.role}.strategy={VEOMNI}", why, "pip install veomni, or model_engine=dp")


def attention_kernel(engine: Engine) -> Iterator[Issue]:
    """No kernel that the setting stands for is here, or none computes the model."""
    asked = engine.option("attention_kernel") or "auto"
    if asked not in ATTENTION_KERNELS:
        return  # the option itself is refused
    needs = AttentionNeeds() if engine.hf_config is None else attention_needs(engine.hf_config.get_text_config())
    if why := setting_obstacle(asked, engine.device, needs):
        fits = asked != "auto" and not setting_obstacle("auto", engine.device, needs)
        fix = f"{ATTENTION_KERNEL}={'auto' if fits else 'sdpa'}, or {STOCK}"
        yield Issue(f"{ATTENTION_KERNEL}={asked}", why, fix)


def float32_attention(engine: Engine) -> Iterator[Issue]:
    """On a GPU attention would fail in the first forward."""
    key, dtype = f"{engine.section}.mixed_precision.param_dtype", engine.get("mixed_precision.param_dtype")
    asked = engine.option("attention_kernel") or "auto"
    if engine.device != "cuda" or asked not in ATTENTION_KERNELS or not PrecisionType.is_fp32(dtype):
        return
    if not any(KERNELS[name].float32 for name in candidates(asked, engine.device)):
        why = f"on a GPU {ATTENTION_KERNEL}={asked} computes in bf16 and fp16 alone"
        yield Issue(f"{key}={dtype}", why, f"{key}=bf16, or {ATTENTION_KERNEL}=sdpa (slow)")


def adapter_dropout(engine: Engine) -> Iterator[Issue]:
    """peft reads it from the adapter, which verl loads under FSDP where a rank is set."""
    path = engine.of_model("lora_adapter_path")
    if not path or not engine.of_model("lora_rank") or engine.on_veomni:
        return
    file = Path(str(path), "adapter_config.json")
    try:
        dropout = float(json.loads(file.read_text())["lora_dropout"])
    except (OSError, ValueError, TypeError, KeyError):  # not on this machine, or no adapter of LoRA: peft tells
        return
    if dropout > 0:
        why = f"{file} says lora_dropout={dropout}, and samples that share a token would share its mask"
        yield Issue(engine.model_setting("lora_adapter_path"), why, f"set lora_dropout to 0 in that file, or {STOCK}")


def veomni(engine: Engine) -> Iterator[Issue]:
    """What verl's VeOmni engine would run, and nobody has held to every sequence alone."""
    if not engine.on_veomni:
        return
    kind, key = getattr(engine.hf_config, "model_type", VEOMNI_TYPES[0]), engine.model_section
    if engine.role == CRITIC:
        yield Issue(f"{CRITIC}.strategy={VEOMNI}", f"a critic on VeOmni {NOT_RUN}", "model_engine=dp")
    if kind not in VEOMNI_TYPES:
        why = f"of VeOmni's models {', '.join(VEOMNI_TYPES)} share prefixes, and {kind} {NOT_RUN}"
        yield Issue(engine.model_setting("path"), why, "model_engine=dp")
    if engine.mode is Mode.PADDED_GROUPS:
        why = f"VeOmni {NOT_RUN} in padded groups"
        yield Issue(f"{key}.use_remove_padding=False", why, f"{key}.use_remove_padding=True")
    if engine.of_model("lora_rank"):
        why = "verl's VeOmni engine has no LoRA and would train the whole model"
        yield Issue(engine.model_setting("lora_rank"), why, f"{key}.lora_rank=0")
    mode = f"{engine.section}.router_replay.mode"
    if (asked := engine.get("router_replay.mode")) not in ("disabled", None):
        if kind != "qwen3_moe":
            yield Issue(f"{mode}={asked}", f"router replay {NOT_RUN} but with qwen3_moe", f"{mode}=disabled")
        elif getattr(engine.hf_config, "num_experts_per_tok", 2) < 2:
            why = "zeros say that a token has no experts to replay, and with one for each token they may be its own"
            yield Issue(f"{mode}={asked}", why, f"{mode}=disabled")
    for name, (proven, why) in VEOMNI_SETTINGS.items():
        if (asked := engine.get(name)) not in (proven, None):
            yield Issue(f"{engine.section}.{name}={asked}", why, f"{engine.section}.{name}={proven}")


def _fuses(engine: Engine) -> bool:
    return engine.mode is Mode.PACKED and engine.role != CRITIC and bool(engine.of_model("use_fused_kernels"))


def _mixers(engine: Engine) -> list[Mixer]:
    """Of the model's layers; none where its config cannot be read here."""
    if engine.hf_config is None:
        return []
    return [MIXERS[name] for name in count_layers(engine.hf_config.get_text_config())]


def _ulysses_obstacles(engine: Engine, size: int) -> list[str]:
    """Why packed mode cannot spread the heads of the model's layers over so many ranks."""
    if engine.mode is not Mode.PACKED or engine.hf_config is None:
        return []
    text = engine.hf_config.get_text_config()
    found = [(mixer.name, mixer.ulysses_obstacle(text, size)) for mixer in _mixers(engine)]
    return [f"{name} layers of {text.model_type}: {why}" for name, why in found if why]


def _encodes_images(engine: Engine) -> bool:
    return engine.hf_config is not None and bool(modality_of(engine.hf_config).kinds)


Rule = Callable[[Engine], Iterator[Issue]]
MACHINE_RULES: tuple[Rule, ...] = (
    *(attention_kernel, compiler, fused_backend, attn_implementation, mixer_kernels, packages),
)
"""What they find on this machine is no more than a warning where the run's machines are others."""
RULES: tuple[Rule, ...] = (
    *(veomni, quantization_aware_training, compiled_layers, fused_kernels, ulysses),
    *(gradient_checkpointing, padded_groups, float32_attention, adapter_dropout, *MACHINE_RULES),
)
