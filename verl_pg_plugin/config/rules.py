"""Rules for runs that share prefixes: each function checks one engine and yields its issues.

They run before Ray starts and when the engine is built.
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
"""Attention implementations that attention over shared prefixes replaces without a warning."""

QAT_MODE = "w4a16"
UNTESTED = "has not been tested with shared prefixes"
VEOMNI_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose VeOmni implementation is tested against single sequences."""
VEOMNI_SETTINGS: dict[str, tuple[Any, str]] = {
    "expert_parallel_size": (1, f"expert parallelism needs several GPUs, on which it {UNTESTED}"),
    "enable_fsdp_offload": (False, f"VeOmni's offload of weights {UNTESTED}"),
    "enable_async_activation_offload": (False, "++prefix_grouper.activations replaces it"),
}
"""Required values of VeOmni's engine config, and why."""


def check_engine(engine_config: Any, model_config: Any) -> None:
    """Raise ValueError if a rule refuses an engine: one line with setting, cause and fix of each error."""
    engine = Engine.of(engine_config, model_config)
    if errors := [issue for rule in RULES for issue in rule(engine) if not issue.is_warning]:
        listing = "; ".join(f"{issue.setting}: {issue.why}. Fix: {issue.fix}" for issue in errors)
        sft = f"; in verl's SFT trainer the sections are model, +engine and +engine.{OPTIONS}"
        raise ValueError(f"use_prefix_grouper=True: {listing}; or set {USE_PREFIX_GROUPER}=False{sft}")


def engine_of(config: DictConfig, role: str, hf_config: Any = None) -> Engine:
    """Return the engine that verl will build for a role of a trainer config."""
    strategy = OmegaConf.select(config, f"{role}.strategy")
    engine = Engine(role, {"strategy": strategy}, {}, get_device_name(), hf_config)
    section: Any = OmegaConf.select(config, engine.section)
    values: Any = OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else {}
    sp_key = f"{engine.section}.{engine.sp_name}"
    if role != CRITIC:
        # verl prefers this deprecated key if it is above 1, except for the critic and under VeOmni.
        size = None if engine.on_veomni else OmegaConf.select(config, f"{role}.{SP_SIZE}")
        sp_key = f"{role}.{SP_SIZE}" if isinstance(size, int) and size > 1 else sp_key
        dynamic = f"{role}.use_dynamic_bsz" if role == ACTOR else f"{role}.log_prob_use_dynamic_bsz"
        values["batches_by_tokens"] = OmegaConf.select(config, dynamic)
        values["pad_to_length"] = values.get("pad_to_length") or OmegaConf.select(config, f"{role}.pad_to_length")
    values |= {
        "strategy": strategy,
        engine.sp_name: OmegaConf.select(config, sp_key),
        "use_prefix_grouper": OmegaConf.select(config, USE_PREFIX_GROUPER),
        OPTIONS: OmegaConf.select(config, OPTIONS),
        "run_ranks": count_of(config, "trainer.nnodes") * count_of(config, "trainer.n_gpus_per_node"),
    }
    return replace(engine, config=values, model=OmegaConf.select(config, engine.model_section), sp_key=sp_key)


def roles_of(config: DictConfig) -> list[str]:
    """Return the config sections of the roles that have an engine in this run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ``need_critic`` warns on each call
        critic = need_critic(config)
    ranks = (OmegaConf.select(config, f"{MODEL}.{rank}") for rank in ("lora.rank", "lora_rank"))
    # With a LoRA adapter, the reference policy is the actor's engine without the adapter.
    adapts = any(ranks) or OmegaConf.select(config, f"{MODEL}.lora_adapter_path") is not None
    ref = need_reference_policy(config) and not adapts
    return [ACTOR, *([REF] if ref else []), *([CRITIC] if critic else [])]


def quantization_aware_training(engine: Engine) -> Iterator[Issue]:
    """Check QAT in the engine's section. Under FSDP verl does not read ``actor.qat``."""
    key, mode = f"{engine.section}.qat", engine.get("qat.mode")
    if not engine.get("qat.enable"):
        return
    if engine.role == CRITIC or engine.mode is Mode.PADDED_GROUPS:
        why = f"quantization-aware training {UNTESTED} in a critic or in padded groups"
        yield Issue(f"{key}.enable=True", why, f"{key}.enable=False")
    elif mode not in (None, QAT_MODE):
        why = f"with shared prefixes only weights-only quantization-aware training is tested, {QAT_MODE}"
        yield Issue(f"{key}.mode={mode}", why, f"{key}.mode={QAT_MODE}, or {STOCK}")


def compiled_layers(engine: Engine) -> Iterator[Issue]:
    if engine.option("compile_layers") is not True:
        return
    if why := layers_obstacle(engine):
        yield Issue(f"{COMPILE_LAYERS}=True", why, f"{COMPILE_LAYERS}=False")
    elif engine.device == "cuda" and engine.hf_config is not None and (why := untested_type(engine)):
        yield Issue(f"{COMPILE_LAYERS}=True", why, f"{COMPILE_LAYERS}=auto", is_warning=True)


def compiler(engine: Engine) -> Iterator[Issue]:
    required = engine.option("compile_layers") is True
    if required and (why := compiler_obstacle(engine.device, has_flat_parameters(engine))):
        yield Issue(f"{COMPILE_LAYERS}=True", why, f"{COMPILE_LAYERS}=False")


def fused_kernels(engine: Engine) -> Iterator[Issue]:
    """Check that verl's fused kernels can replace the LM head; the engine checks a checkpoint's own model class."""
    if not (_uses_fused_kernels(engine) and type(engine.hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING):
        return
    key = f"{engine.model_section}.use_fused_kernels"
    try:
        module = text_skeleton(engine.hf_config)
    except Exception as error:  # a model class may raise anything; the engine checks what it builds
        why = f"transformers builds no {engine.hf_config.model_type} from this config, so its head was not checked"
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield Issue(f"{key}=True", f"{why} ({cause})", f"{key}=False", is_warning=True)
        return
    if why := fused_obstacle(module):
        yield Issue(f"{key}=True", why, f"{key}=False")


def fused_backend(engine: Engine) -> Iterator[Issue]:
    if not _uses_fused_kernels(engine):
        return
    name, why, replaced = engine.of_model("fused_kernel_options.impl_backend"), "", False
    if name not in ("torch", "triton", "liger"):
        why = "is unknown to this plugin; the backends are torch, triton and liger"
    elif replaced := name == "liger" and importlib.util.find_spec("liger_kernel") is None:
        why = "needs the package liger-kernel, which is not installed; verl uses torch instead"
    elif name != "torch" and engine.device != "cuda":
        why = f"needs a GPU, and this machine's device is {engine.device!r}"
    if why:
        key = f"{engine.model_section}.fused_kernel_options.impl_backend"
        yield Issue(f"{key}={name}", why, f"{key}=torch", is_warning=replaced)


def ulysses(engine: Engine) -> Iterator[Issue]:
    """Check the Ulysses size. The number of ranks is known only before Ray starts."""
    size, ranks = engine.sp_size, engine.get("run_ranks") or 0
    obstacles = _ulysses_obstacles(engine, size) if size > 1 else []
    if not obstacles and ranks % size:
        obstacles = [f"{size} ranks that share tokens do not divide the run's {ranks}"]
    if obstacles:
        sizes = (smaller for smaller in range(2, size) if not ranks % smaller)
        fits = max((smaller for smaller in sizes if not _ulysses_obstacles(engine, smaller)), default=1)
        yield Issue(f"{engine.sp_key}={size}", "; ".join(obstacles), f"{engine.sp_key}={fits}")


def gradient_checkpointing(engine: Engine) -> Iterator[Issue]:
    section, kind = engine.model_section, getattr(engine.hf_config, "model_type", "")
    key, offload = f"{section}.enable_gradient_checkpointing", f"{section}.enable_activation_offload"
    casts = engine.get("strategy") == "fsdp2" and not PrecisionType.is_fp32(engine.get("mixed_precision.param_dtype"))
    if not engine.of_model("enable_gradient_checkpointing"):
        activations, level = f"++{OPTIONS}.activations", engine.option("activations")
        why = "without gradient checkpointing layers keep all activations on the device, and nothing is offloaded"
        if engine.of_model("enable_activation_offload"):  # the option activations replaces it
            yield Issue(f"{offload}=True", why, f"{key}=True, or {offload}=False", is_warning=True)
        elif level in {other.value for other in Level} - {"all"}:
            yield Issue(f"{activations}={level}", why, f"{key}=True, or {activations}=all", is_warning=True)
    elif engine.role != REF and casts and kind in FLOAT32_ANGLE_TYPES and not FSDP2_CASTS_AGAIN:
        why = f"FSDP2 of torch {torch.__version__} fails to recompute {kind} layers: rotary angles of another dtype"
        fix = f"{key}=False, or {engine.role}.strategy=fsdp, or pip install 'torch>=2.13'"
        yield Issue(f"{key}=True", why, fix)


def attn_implementation(engine: Engine) -> Iterator[Issue]:
    """Check the attention of the model. This plugin replaces it in the text model, not in an image encoder."""
    key = f"{engine.model_section}.override_config.attn_implementation"
    name = engine.of_model("override_config.attn_implementation") or "flash_attention_2"  # verl's default
    runs = engine.device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    if name not in REPLACED_ATTENTION:
        why = "attention over shared prefixes replaces it"
        yield Issue(f"{key}={name}", why, f"++{key}=sdpa", is_warning=True)
    has_encoder = getattr(engine.hf_config, "vision_config", None) is not None  # also where only text is trained
    if engine.mode is Mode.PACKED and name == "flash_attention_2" and not runs and has_encoder:
        why = f"the vision encoder of {engine.hf_config.model_type} is built with it, and it needs a GPU and flash-attn"
        yield Issue(f"{key}={name}", why, f"++{key}=sdpa")


def mixer_kernels(engine: Engine) -> Iterator[Issue]:
    for mixer in _mixers(engine) if engine.mode is Mode.PACKED else ():
        for why in mixer.machine_obstacles(engine.device):
            yield Issue(engine.model_setting("path"), why, f"install the package that it names, if any, or {STOCK}")


def padded_groups(engine: Engine) -> Iterator[Issue]:
    """Check that padded groups reach the model whole and in order. Packed mode supports all of these settings."""
    if engine.mode is not Mode.PADDED_GROUPS:
        return
    padding, model_type = engine.model_setting("use_remove_padding"), getattr(engine.hf_config, "model_type", "")
    cut, switch = engine.get("use_dynamic_bsz"), f"{'log_prob_' if engine.role == REF else ''}use_dynamic_bsz"
    by_tokens = engine.get("batches_by_tokens")  # known only before Ray starts, and not for SFT
    supported = (mixer for mixer in _mixers(engine) if not mixer.obstacles(engine.hf_config.get_text_config()))
    packed_only = ", ".join(mixer.name for mixer in supported if not mixer.padded_groups)
    fused = engine.model_setting("use_fused_kernels")
    refused = (
        (engine.role == CRITIC and cut is not False, padding, "verl cuts the critic's micro-batches by token count"),
        (by_tokens, f"{engine.role}.{switch}=True", "dynamic micro-batches cut groups by token count"),
        (engine.of_model("use_fused_kernels"), fused, "the LM head of padded groups bypasses verl's fused kernels"),
        (engine.sp_size > 1, f"{engine.sp_key}={engine.sp_size}", "sequence parallelism would cut padded groups"),
        (engine.get("pad_to_length"), f"{engine.section}.pad_to_length=True", "groups are padded to the longest group"),
        (packed_only, padding, f"{packed_only} layers of {model_type} support packed mode only"),
        (_encodes_images(engine), padding, f"{model_type} reads images, which padded groups do not support"),
    )
    packed = f"{engine.model_section}.use_remove_padding=True (packed mode, which supports it)"
    yield from (Issue(setting, why, f"{packed}, or leave the setting out") for wrong, setting, why in refused if wrong)


def packages(engine: Engine) -> Iterator[Issue]:
    if engine.mode is Mode.PADDED_GROUPS and importlib.util.find_spec("prefix_grouper") is None:
        why = "padded groups need the package prefix_grouper, which is not installed"
        packed = f"{engine.model_section}.use_remove_padding=True (packed mode)"
        yield Issue(engine.model_setting("use_remove_padding"), why, f"pip install prefix_grouper, or {packed}")
    if engine.on_veomni and importlib.util.find_spec("veomni") is None:
        why = "verl's VeOmni engine needs the package veomni, which is not installed"
        yield Issue(f"{engine.role}.strategy={VEOMNI}", why, "pip install veomni, or model_engine=dp")


def attention_kernel(engine: Engine) -> Iterator[Issue]:
    """Check that a kernel of the setting is installed and supports the model."""
    name = engine.option("attention_kernel") or "auto"
    if name not in ATTENTION_KERNELS:
        return  # ``option_issues`` refuses it
    needs = AttentionNeeds() if engine.hf_config is None else attention_needs(engine.hf_config.get_text_config())
    if why := setting_obstacle(name, engine.device, needs):
        fits = name != "auto" and not setting_obstacle("auto", engine.device, needs)
        fix = f"{ATTENTION_KERNEL}={'auto' if fits else 'sdpa'}, or {STOCK}"
        yield Issue(f"{ATTENTION_KERNEL}={name}", why, fix)


def float32_attention(engine: Engine) -> Iterator[Issue]:
    """Check that a kernel computes float32 on a GPU; otherwise the first forward would fail."""
    key, dtype = f"{engine.section}.mixed_precision.param_dtype", engine.get("mixed_precision.param_dtype")
    setting = engine.option("attention_kernel") or "auto"
    if engine.device != "cuda" or setting not in ATTENTION_KERNELS or not PrecisionType.is_fp32(dtype):
        return
    if not any(KERNELS[name].float32 for name in candidates(setting, engine.device)):
        why = f"on a GPU {ATTENTION_KERNEL}={setting} supports only bf16 and fp16"
        yield Issue(f"{key}={dtype}", why, f"{key}=bf16, or {ATTENTION_KERNEL}=sdpa (slow)")


def adapter_dropout(engine: Engine) -> Iterator[Issue]:
    """Check the dropout of a LoRA adapter, which verl loads under FSDP if a rank is set."""
    path = engine.of_model("lora_adapter_path")
    if not path or not engine.of_model("lora_rank") or engine.on_veomni:
        return
    file = Path(str(path), "adapter_config.json")
    try:
        dropout = float(json.loads(file.read_text())["lora_dropout"])
    except (OSError, ValueError, TypeError, KeyError):  # not on this machine, or not a LoRA adapter: peft reports it
        return
    if dropout > 0:
        why = f"{file} has lora_dropout={dropout}, and samples would share the dropout mask of a shared token"
        yield Issue(engine.model_setting("lora_adapter_path"), why, f"set lora_dropout to 0 in that file, or {STOCK}")


def veomni(engine: Engine) -> Iterator[Issue]:
    """Refuse settings of verl's VeOmni engine that no test compares with single sequences."""
    if not engine.on_veomni:
        return
    kind, key = getattr(engine.hf_config, "model_type", VEOMNI_TYPES[0]), engine.model_section
    if engine.role == CRITIC:
        yield Issue(f"{CRITIC}.strategy={VEOMNI}", f"a critic on VeOmni {UNTESTED}", "model_engine=dp")
    if kind not in VEOMNI_TYPES:
        why = f"{kind} on VeOmni {UNTESTED}, only {', '.join(VEOMNI_TYPES)} have"
        yield Issue(engine.model_setting("path"), why, "model_engine=dp")
    if engine.mode is Mode.PADDED_GROUPS:
        why = f"VeOmni {UNTESTED} in padded groups"
        yield Issue(f"{key}.use_remove_padding=False", why, f"{key}.use_remove_padding=True")
    if engine.of_model("lora_rank"):
        why = "verl's VeOmni engine has no LoRA and would train the whole model"
        yield Issue(engine.model_setting("lora_rank"), why, f"{key}.lora_rank=0")
    mode = f"{engine.section}.router_replay.mode"
    if (value := engine.get("router_replay.mode")) not in ("disabled", None):
        if kind != "qwen3_moe":
            yield Issue(f"{mode}={value}", f"router replay {UNTESTED} except with qwen3_moe", f"{mode}=disabled")
        elif getattr(engine.hf_config, "num_experts_per_tok", 2) < 2:
            why = "zeros mark tokens without experts to replay, and with one expert per token 0 may be an expert"
            yield Issue(f"{mode}={value}", why, f"{mode}=disabled")
    for name, (required, why) in VEOMNI_SETTINGS.items():
        if (value := engine.get(name)) not in (required, None):
            yield Issue(f"{engine.section}.{name}={value}", why, f"{engine.section}.{name}={required}")


def _uses_fused_kernels(engine: Engine) -> bool:
    return engine.mode is Mode.PACKED and engine.role != CRITIC and bool(engine.of_model("use_fused_kernels"))


def _mixers(engine: Engine) -> list[Mixer]:
    """Return the mixers of the model's layers; none if its config cannot be read here."""
    if engine.hf_config is None:
        return []
    return [MIXERS[name] for name in count_layers(engine.hf_config.get_text_config())]


def _ulysses_obstacles(engine: Engine, size: int) -> list[str]:
    """Return why packed mode cannot split the heads of the model's layers across ``size`` ranks."""
    if engine.mode is not Mode.PACKED or engine.hf_config is None:
        return []
    text = engine.hf_config.get_text_config()
    obstacles = [(mixer.name, mixer.ulysses_obstacle(text, size)) for mixer in _mixers(engine)]
    return [f"{name} layers of {text.model_type}: {why}" for name, why in obstacles if why]


def _encodes_images(engine: Engine) -> bool:
    return engine.hf_config is not None and bool(modality_of(engine.hf_config).kinds)


Rule = Callable[[Engine], Iterator[Issue]]
MACHINE_RULES: tuple[Rule, ...] = (
    *(attention_kernel, compiler, fused_backend, attn_implementation, mixer_kernels, packages),
)
"""Rules about this machine: their errors are warnings if the run uses other machines."""
RULES: tuple[Rule, ...] = (
    *(veomni, quantization_aware_training, compiled_layers, fused_kernels, ulysses),
    *(gradient_checkpointing, padded_groups, float32_attention, adapter_dropout, *MACHINE_RULES),
)
