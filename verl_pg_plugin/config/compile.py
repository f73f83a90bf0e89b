"""Whether decoder layers are compiled: one decision, for the engines, preflight and the doctor alike.

``engine/compiled_layers.py`` compiles them.
"""

import importlib.util
import inspect
import os
import shutil
import sysconfig
from pathlib import Path

from verl_pg_plugin.config.keys import OPTIONS
from verl_pg_plugin.config.mode import Engine, Mode

COMPILE_LAYERS = f"++{OPTIONS}.compile_layers"

_RAN_ON_A_GPU = """
arcee axk1 beam bitnet codegen cohere cohere2 cohere2_moe cohere_compass_text cwm deepseek_v2 deepseek_v3 dots1
ernie4_5 exaone exaone4 exaone_moe flint fuyu gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm glm4
glm4_moe glm4_moe_lite gpt_bigcode gpt_neox gpt_oss gptj granite helium hrm_text hunyuan_v1_dense hunyuan_v1_moe
hy_v3 hyperclovax internlm3 iquestcoder jais2 laguna llama mellum minimax_m2 minimax_m3_vl_text ministral ministral3
mistral mixtral moshi nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 qwen2 qwen2_5_vl qwen2_moe qwen2_vl
qwen3 qwen3_moe qwen3_vl qwen3_vl_moe sarvam_mla sarvam_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""
COMPILED_TYPES = frozenset(_RAN_ON_A_GPU.split())
"""Types whose layers ``compile_layers=auto`` compiles. On a GPU in bf16 each was as close to float32 as stock verl
(docs/data/gpu_tests_one_h200.csv), on a CPU exact in float32 (``tests/architectures/test_compiled_layers.py``)."""

WRONG_COMPILED: dict[str, str] = {"apertus": "are 1e-4 off in a log-prob and 1e-5 in a gradient (torch 2.13 on a CPU)"}
"""Types whose layers are wrong under ``torch.compile``: refused with ``compile_layers=True``."""

MANAGED, WHOLE = "_is_fsdp_managed_module", "_fsdp_use_orig_params"
"""Flags of a module under FSDP1: the second, which FSDP never reads, decides whether dynamo compiles the module."""


def layer_compilation(engine: Engine) -> tuple[bool, str]:
    """Whether an engine whose checkpoint's config is known compiles its decoder layers, and why."""
    asked = engine.option("compile_layers")
    if asked != "auto":
        unsure = untested_type(engine) if asked is True and engine.device == "cuda" else ""
        return asked is True, f"{COMPILE_LAYERS}={asked}" + (f"; {unsure}" if unsure else "")
    flat = has_flat_parameters(engine)
    if why := layers_obstacle(engine) or compiler_obstacle(engine.device, flat):
        return False, f"{COMPILE_LAYERS}=auto: {why}"
    own_class = "AutoModelForCausalLM" in (getattr(engine.hf_config, "auto_map", None) or {})
    wraps = flat and any((engine.get("wrap_policy") or {}).values())
    untested = "compiled layers have not been tested with"
    reasons = (
        (engine.of_model("use_liger"), f"{untested} Liger kernels (use_liger)"),
        (engine.get("qat.enable"), f"{untested} quantization-aware training (qat)"),
        (wraps, "under strategy=fsdp a wrap_policy may make units inside layers, around which torch compiles nothing"),
        (engine.get("strategy") == "fsdp" and engine.of_model("lora_rank"), f"{untested} LoRA under strategy=fsdp"),
        (engine.on_veomni, "compiled layers of VeOmni's models have not run on a GPU"),
        (own_class and engine.of_model("trust_remote_code"), "the checkpoint may bring a model class of its own"),
    )
    unsafe = next((why for is_so, why in reasons if is_so), "")
    if not unsafe and engine.device != "cuda":
        unsafe = f"compiling pays on a GPU, and this device is {engine.device}"
    if unsafe := unsafe or untested_type(engine):
        return False, f"{COMPILE_LAYERS}=auto: {unsafe}; {COMPILE_LAYERS}=True compiles them all the same"
    return True, f"{COMPILE_LAYERS}=auto: {engine.hf_config.model_type} ran compiled on a GPU"


def untested_type(engine: Engine) -> str:
    """Why the layers of a model type may not be exact, or fail, compiled on a GPU; empty of types that ran so."""
    model_type = getattr(engine.hf_config, "model_type", "")
    return "" if model_type in COMPILED_TYPES else f"layers of {model_type} have not been tested compiled on a GPU"


def layers_obstacle(engine: Engine) -> str:
    """Why an engine cannot run its layers compiled, whatever the machine; empty if it can."""
    model_type = getattr(engine.hf_config, "model_type", "")
    if engine.mode is not Mode.PACKED:
        return "compiled layers have not been verified with padded groups"
    if has_flat_parameters(engine) and engine.of_model("lora_rank"):
        return "strategy=fsdp makes each adapter of LoRA a unit of its own inside a layer, and strategy=fsdp2 does not"
    if engine.on_veomni and engine.get("router_replay.mode") in ("R2", "R3"):
        return "router replay tells each layer its experts, and torch would compile every layer by itself"
    return f"compiled layers of {model_type} {WRONG_COMPILED[model_type]}" if model_type in WRONG_COMPILED else ""


def has_flat_parameters(engine: Engine) -> bool:
    """Whether FSDP1 keeps the parameters of a layer as views of one flat parameter."""
    return engine.get("strategy") == "fsdp" and not engine.get("use_orig_params")


def compiler_obstacle(device: str, flat_parameters: bool = False) -> str:
    """Why torch compiles nothing here; empty if nothing is in the way. Compiles nothing to find out."""
    from torch._dynamo import config  # seconds, which a run that does not ask is spared

    if config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is switched off; unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
    if config.suppress_errors:
        return "torch would hide failures and run layers uncompiled; unset TORCHDYNAMO_SUPPRESS_ERRORS"
    if flat_parameters and (why := _flat_parameters_obstacle()):
        return why
    if device != "cuda":
        named = os.environ.get("CXX", "g++")  # all that torch looks for on Linux
        return "" if shutil.which(named) else f"torch.compile needs a C++ compiler and does not find {named}"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton, which is not installed: pip install triton"
    usual = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, usual)):
        return f"Triton needs a C compiler and does not find {' or '.join(usual)}: install gcc, or set CC to one"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python.h and finds none: install python3-dev"
    return ""


def _flat_parameters_obstacle() -> str:
    """Why ``let_flat_parameters_compile`` does nothing with the installed torch; empty if it does what it says."""
    from torch._dynamo.variables import builder

    source = inspect.getsource(builder)
    if MANAGED in source and WHOLE in source:
        return ""
    return f"this torch does not ask {WHOLE} of the layers of FSDP1 (strategy=fsdp); those of strategy=fsdp2 compile"
