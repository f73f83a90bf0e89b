"""Whether decoder layers are compiled: one decision, for the engines, the rules and the doctor alike.

``prefix_grouper.compile_layers=auto`` compiles them wherever tests have shown that it works. True compiles them
wherever nothing is known to keep it from working, and is refused elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_pg_plugin.architectures.compiled_types import BREAKING_TYPES, COMPILED_TYPES, NOT_ON_GPU, ON_CPU_ALONE
from verl_pg_plugin.config.facts import Facts
from verl_pg_plugin.config.keys import OPTIONS
from verl_pg_plugin.config.mode import Mode, is_set

__all__ = [
    "CompilerFacts",
    "Decision",
    "Obstacle",
    "asks_to_compile",
    "compiler_obstacle",
    "decide",
    "model_obstacle",
    "obstacles",
]

COMPILE_LAYERS = f"{OPTIONS}.compile_layers"
AUTO = "auto"
PROVEN_DEVICE = "cuda"


@dataclass(frozen=True)
class Obstacle:
    """Something that speaks against compiled layers.

    Attributes:
        why: cause, without a final full stop.
        forbids: whether they cannot work; else nobody has tested them, and True tries.
    """

    why: str
    forbids: bool


@dataclass(frozen=True)
class CompilerFacts:
    """What the decision looks at.

    Attributes:
        mode: how sequences enter the model.
        device: type of the device, as verl names it.
        model_type: of the checkpoint's config; None while it has not been read.
        own_class: the checkpoint brings a model class of its own, and is trusted to.
        strategy: "fsdp" or "fsdp2".
        flat_parameters: FSDP1 without ``use_orig_params``.
        liger, tiled_mlp: verl replaces parts of the layers.
        compiler: why this machine or this environment compiles nothing; empty if it does.
    """

    mode: Mode
    device: str
    model_type: str | None
    own_class: bool = False
    strategy: str = "fsdp2"
    flat_parameters: bool = False
    liger: bool = False
    tiled_mlp: bool = False
    compiler: str = ""

    @classmethod
    def of(cls, facts: Facts) -> CompilerFacts:
        """Read from what one engine is asked to do, and from this machine."""
        config, strategy = facts.hf_config, str(facts.value("strategy"))
        brings_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        return cls(
            mode=facts.mode,
            device=facts.device_name,
            model_type=None if config is None else config.model_type,
            own_class=brings_class and is_set(facts.value("trust_remote_code")),
            strategy=strategy,
            flat_parameters=strategy == "fsdp" and not facts.value("use_orig_params"),
            liger=is_set(facts.value("use_liger") or False),
            tiled_mlp=is_set(facts.value("tiled_mlp") or False),
            compiler=compiler_obstacle(facts.device_name),
        )


@dataclass(frozen=True)
class Decision:
    """Whether an engine compiles its decoder layers, and why."""

    on: bool
    reason: str


def asks_to_compile(asked: Any) -> bool:
    """Whether a value of ``prefix_grouper.compile_layers`` insists on compiled layers."""
    return asked is not None and asked != AUTO and is_set(asked)


def decide(asked: bool | str, facts: CompilerFacts) -> Decision:
    """What ``prefix_grouper.compile_layers`` comes to.

    Args:
        asked: its value: auto, True or False.
        facts: of the engine, its model read.
    """
    setting = f"{COMPILE_LAYERS}={asked}"
    if asked != AUTO:
        return Decision(asked is True, setting)
    found = next(obstacles(facts), None)
    if found is None:
        device = "a CPU" if facts.model_type in ON_CPU_ALONE else facts.device
        return Decision(True, f"{setting}: tested with {facts.model_type} on {device}")
    way = "" if found.forbids else f"; ++{COMPILE_LAYERS}=True compiles them all the same"
    return Decision(False, f"{setting}: {found.why}{way}")


def obstacles(facts: CompilerFacts) -> Iterator[Obstacle]:
    """Everything that speaks against it, what forbids it first."""
    if facts.mode is not Mode.PACKED:
        yield Obstacle("compiled layers have not been verified with padded groups", forbids=True)
    if facts.flat_parameters:
        yield Obstacle("torch compiles no layer of flat parameters (FSDP1); strategy=fsdp2 has none", forbids=True)
    if facts.compiler:
        yield Obstacle(facts.compiler, forbids=True)
    if found := model_obstacle(facts.model_type):
        yield Obstacle(found, forbids=True)
    if facts.device != PROVEN_DEVICE:
        yield Obstacle(f"compiling pays on a GPU, and this device is {facts.device}", forbids=False)
    if facts.own_class:
        yield Obstacle("the checkpoint brings a model class of its own", forbids=False)
    elif facts.model_type not in COMPILED_TYPES:
        yield Obstacle(f"compiled layers of {facts.model_type} have not been tested", forbids=False)
    elif facts.model_type in NOT_ON_GPU:
        yield Obstacle(f"compiled layers of {facts.model_type} {NOT_ON_GPU[facts.model_type]}", forbids=False)
    if facts.strategy != "fsdp2":
        yield Obstacle(f"compiled layers have not been tested with strategy={facts.strategy}", forbids=False)
    if facts.liger:
        yield Obstacle("compiled layers have not been tested with Liger kernels (use_liger)", forbids=False)
    if facts.tiled_mlp:
        yield Obstacle("compiled layers have not been tested with a tiled MLP (tiled_mlp)", forbids=False)


def model_obstacle(model_type: str | None) -> str:
    """Why layers of a type cannot run compiled; empty if they can, or if nobody knows."""
    why = BREAKING_TYPES.get(model_type or "")
    return f"compiled layers of {model_type} {why}" if why else ""


def compiler_obstacle(device: str) -> str:
    """Why torch compiles nothing here; empty if nothing is in the way. Compiles nothing to find out."""
    from torch._dynamo import config  # seconds, which a run that does not ask is spared

    if config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is switched off; unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
    if config.suppress_errors:
        return "torch would hide failures and run layers uncompiled; unset TORCHDYNAMO_SUPPRESS_ERRORS"
    if device == "cuda":
        return _triton_obstacle()
    why = _missing("CXX", "g++")  # all that torch looks for on Linux
    return f"torch.compile needs a C++ compiler and {why}" if why else ""


def _triton_obstacle() -> str:
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton, which is not installed: pip install triton"
    if why := _missing("CC", "gcc", "clang"):
        return f"Triton needs a C compiler and {why}"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python.h and finds none: install python3-dev"
    return ""


def _missing(variable: str, *usual: str) -> str:
    """Why there is no compiler; empty if the one that ``variable`` names, or a usual one where it is unset, is there.

    torch and Triton run what the variable holds as the name of one program, blanks and all.
    """
    named = os.environ.get(variable)
    if named is None:
        return "" if any(map(shutil.which, usual)) else f"finds none: install {usual[0]}, or name one in {variable}"
    if shutil.which(named):
        return ""
    words = named.split()
    if len(words) > 1 and shutil.which(words[0]):
        return f"runs {variable}={named!r} as the name of one program: name one without arguments, or a script"
    return f"does not find {variable}={named!r}: correct it, or unset it and install {usual[0]}"
