"""Decide whether decoder layers are compiled; ``engine/compiled_layers.py`` compiles them."""

import importlib.util
import inspect
import os
import shutil
import sysconfig
from pathlib import Path

from verl_pg_plugin.config.keys import OPTIONS
from verl_pg_plugin.config.mode import Engine, Mode
from verl_pg_plugin.tested import COMPILED_TYPES

COMPILE_LAYERS = f"++{OPTIONS}.compile_layers"

WRONG_COMPILED: dict[str, str] = {"apertus": "are 1e-4 off in a log-prob and 1e-5 in a gradient (torch 2.13 on a CPU)"}
"""Model types with inexact layers under ``torch.compile``: ``compile_layers=True`` is refused."""

MANAGED, WHOLE = "_is_fsdp_managed_module", "_fsdp_use_orig_params"
"""Module flags of FSDP1. FSDP never reads the second; it decides whether dynamo compiles the module."""


def layer_compilation(engine: Engine) -> tuple[bool, str]:
    """Return whether an engine with a known checkpoint config compiles its decoder layers, and why."""
    option = engine.option("compile_layers")
    if option != "auto":
        caution = untested_type(engine) if option is True and engine.device == "cuda" else ""
        return option is True, f"{COMPILE_LAYERS}={option}" + (f"; {caution}" if caution else "")
    flat = has_flat_parameters(engine)
    if why := layers_obstacle(engine) or compiler_obstacle(engine.device, flat):
        return False, f"{COMPILE_LAYERS}=auto: {why}"
    custom_class = "AutoModelForCausalLM" in (getattr(engine.hf_config, "auto_map", None) or {})
    custom_wrap = flat and any((engine.get("wrap_policy") or {}).values())
    untested = "compiled layers have not been tested with"
    reasons = (
        (engine.of_model("use_liger"), f"{untested} Liger kernels (use_liger)"),
        (engine.get("qat.enable"), f"{untested} quantization-aware training (qat)"),
        (custom_wrap, "with strategy=fsdp torch compiles no layer in which a wrap_policy wraps submodules"),
        (engine.get("strategy") == "fsdp" and engine.of_model("lora_rank"), f"{untested} LoRA under strategy=fsdp"),
        (engine.on_veomni, "the speed of compiled layers on VeOmni has not been measured"),
        (custom_class and engine.of_model("trust_remote_code"), "the checkpoint may bring its own model class"),
    )
    unsafe = next((why for applies, why in reasons if applies), "")
    if not unsafe and engine.device != "cuda":
        unsafe = f"compiling pays on a GPU, and this device is {engine.device}"
    if unsafe := unsafe or untested_type(engine):
        return False, f"{COMPILE_LAYERS}=auto: {unsafe}; {COMPILE_LAYERS}=True compiles them anyway"
    return True, f"{COMPILE_LAYERS}=auto: {engine.hf_config.model_type} ran compiled on a GPU"


def untested_type(engine: Engine) -> str:
    """Return why compiled layers of this model type may be inexact or fail on a GPU, or '' if they were tested."""
    model_type = getattr(engine.hf_config, "model_type", "")
    return "" if model_type in COMPILED_TYPES else f"layers of {model_type} have not been tested compiled on a GPU"


def layers_obstacle(engine: Engine) -> str:
    """Return why an engine cannot run compiled layers on any machine, or '' if it can."""
    model_type = getattr(engine.hf_config, "model_type", "")
    if engine.mode is not Mode.PACKED:
        return "compiled layers have not been verified with padded groups"
    if has_flat_parameters(engine) and engine.of_model("lora_rank"):
        return "strategy=fsdp wraps each LoRA adapter as an FSDP unit inside a layer, and strategy=fsdp2 does not"
    if engine.on_veomni and engine.get("router_replay.mode") in ("R2", "R3"):
        return "router replay passes each layer its experts, so torch would compile every layer separately"
    return f"compiled layers of {model_type} {WRONG_COMPILED[model_type]}" if model_type in WRONG_COMPILED else ""


def has_flat_parameters(engine: Engine) -> bool:
    """Return True if FSDP1 keeps the parameters of a layer as views of one flat parameter."""
    return engine.get("strategy") == "fsdp" and not engine.get("use_orig_params")


def compiler_obstacle(device: str, flat_parameters: bool = False) -> str:
    """Return why torch cannot compile on this machine, or '' if it can. Nothing is compiled to check."""
    from torch._dynamo import config  # a slow import

    if config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is switched off; unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
    if config.suppress_errors:
        return "torch would hide failures and run layers uncompiled; unset TORCHDYNAMO_SUPPRESS_ERRORS"
    if flat_parameters:
        from torch._dynamo.variables import builder

        source = inspect.getsource(builder)
        if not (MANAGED in source and WHOLE in source):
            return f"this torch does not read {WHOLE} of FSDP1 layers (strategy=fsdp); layers of strategy=fsdp2 compile"
    if device != "cuda":
        cxx = os.environ.get("CXX", "g++")  # torch tries nothing else on Linux
        return "" if shutil.which(cxx) else f"torch.compile needs a C++ compiler and does not find {cxx}"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton, which is not installed: pip install triton"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"Triton needs a C compiler and does not find {' or '.join(compilers)}: install gcc, or set CC to one"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python.h, which is missing: install python3-dev"
    return ""
