"""Whether decoder layers are compiled: one decision, for the engines, preflight and the doctor alike."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from verl_pg_plugin.architectures import UNCOMPILED, WRONG_COMPILED
from verl_pg_plugin.config.keys import OPTIONS
from verl_pg_plugin.config.mode import Engine, Mode
from verl_pg_plugin.upstream import flat_parameters_obstacle

COMPILE_LAYERS = f"++{OPTIONS}.compile_layers"


def layer_compilation(engine: Engine) -> tuple[bool, str]:
    """Whether an engine whose checkpoint's config is known compiles its decoder layers, and why."""
    asked = engine.option("compile_layers")
    if asked != "auto":
        model_type, why = engine.hf_config.model_type, f"{COMPILE_LAYERS}={asked}"
        unsure = asked is True and engine.device == "cuda" and model_type in UNCOMPILED
        return asked is True, why + (f"; layers of {model_type} {UNCOMPILED[model_type]}" if unsure else "")
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
    return compiled_by_auto(engine.hf_config.model_type, engine.device, unsafe)


def compiled_by_auto(model_type: str, device: str, unsafe: str = "") -> tuple[bool, str]:
    """What ``compile_layers=auto`` comes to where a compiler works, and why; ``unsafe`` is what else is against it."""
    if model_type in WRONG_COMPILED:
        return False, f"{COMPILE_LAYERS}=auto: compiled layers of {model_type} {WRONG_COMPILED[model_type]}"
    if device != "cuda":
        unsafe = f"compiling pays on a GPU, and this device is {device}"
    elif model_type in UNCOMPILED:
        unsafe = f"layers of {model_type} {UNCOMPILED[model_type]}"
    if unsafe:
        return False, f"{COMPILE_LAYERS}=auto: {unsafe}; {COMPILE_LAYERS}=True compiles them all the same"
    return True, f"{COMPILE_LAYERS}=auto: nothing is known against it for {model_type} on {device}"


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
    if flat_parameters and (why := flat_parameters_obstacle()):
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
