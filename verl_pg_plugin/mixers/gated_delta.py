"""Gated DeltaNet as a mixer, and whether this machine computes the gated delta rule and its backward rightly.

On a GPU the recurrence needs the kernels of fla, which transformers takes where they are installed: its own fallback
pads segments to equal lengths and steps through them on the host. Known fault: with Triton 3.4 to 3.7.0 the gated
backward is wrong on Hopper, and fla raises in the first one (https://github.com/fla-org/flash-linear-attention/issues/640);
where tilelang is installed, fla takes that instead.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from packaging.version import Version
from transformers import PretrainedConfig

from verl_pg_plugin.mixers.attention import PairCost
from verl_pg_plugin.mixers.delta_layer import GATED_DELTA, install

__all__ = ["GATED_DELTA", "MULTIMODAL_MODEL_TYPES", "GatedDelta", "has_fla", "kernel_obstacles"]

LINEAR = "linear_attention"
TEXT_MODEL_TYPES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
MULTIMODAL_MODEL_TYPES = frozenset({"qwen3_5", "qwen3_5_moe"})
WRONG_ON_HOPPER = (Version("3.4"), Version("3.7.1"))
"""Triton from the first up to, and without, the second."""
HOPPER = 9
INSTALL_FLA = "pip install fla-core"
INSTALL_TRITON = "pip install --no-deps 'triton>=3.7.1', or pip install tilelang"


class GatedDelta:
    """The linear attention layers of Qwen3-Next and Qwen3.5."""

    name: ClassVar[str] = GATED_DELTA
    layer_types: ClassVar[frozenset[str]] = frozenset({LINEAR})
    stateful_model_types: ClassVar[frozenset[str]] = TEXT_MODEL_TYPES | MULTIMODAL_MODEL_TYPES
    ulysses: ClassVar[bool] = False
    prefix_cache: ClassVar[bool] = False
    padded_groups: ClassVar[bool] = False

    def obstacles(self, config: PretrainedConfig) -> list[str]:
        if config.model_type in TEXT_MODEL_TYPES:
            return []
        known = ", ".join(sorted(TEXT_MODEL_TYPES))
        return [f"{config.model_type} has linear attention that is not known to be Gated DeltaNet, as {known}"]

    def machine_obstacles(self, device_name: str) -> list[str]:
        return kernel_obstacles(device_name)

    def prepare(self, config: PretrainedConfig) -> None:
        """Nothing to do: layers are changed in the built model."""

    def install(self, module: Any) -> None:
        install(module)

    def pair_costs(self, config: PretrainedConfig) -> tuple[PairCost, ...]:
        """None: a token reads a state of fixed size, however many tokens are before it."""
        return ()

    def token_flops(self, config: PretrainedConfig) -> float:
        """The recurrence with a K x V state per head: two FLOPs per number to read it, to correct it, to query it.

        The chunked kernels multiply more, to be faster; that is how they compute and not what a token needs.
        """
        layers = list(config.layer_types)[: config.num_hidden_layers].count(LINEAR)
        state = config.linear_key_head_dim * config.linear_value_head_dim
        return 6.0 * layers * config.linear_num_value_heads * state


def kernel_obstacles(device_name: str) -> list[str]:
    """Why Gated DeltaNet cannot run on this machine, with the command that changes it; empty if it can.

    Args:
        device_name: device type as verl names it; on a CPU nothing is needed.
    """
    if device_name != "cuda":
        return []
    if not has_fla():
        return [f"Gated DeltaNet needs the kernels of flash-linear-attention, which is not installed: {INSTALL_FLA}"]
    triton = _installed("triton")
    first, fixed = WRONG_ON_HOPPER
    wrong = triton is not None and first <= triton < fixed and find_spec("tilelang") is None
    if wrong and HOPPER in gpu_generations():
        why = f"the backward of the gated delta rule is wrong on Hopper with Triton {first} to {fixed} (here {triton})"
        return [f"{why}: {INSTALL_TRITON}"]
    return []


def has_fla() -> bool:
    """Whether flash-linear-attention is installed, which transformers then takes on a GPU."""
    return find_spec("fla") is not None


def gpu_generations() -> frozenset[int]:
    """Major compute capabilities of this machine's GPUs; empty where there is none.

    ``nvidia-smi`` tells without a CUDA context. Where it cannot, or torch has a GPU in use already, torch is asked.
    """
    command = None if torch.cuda.is_initialized() else shutil.which("nvidia-smi")
    if command is not None:
        query = [command, "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            result = subprocess.run(query, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:  # torch is asked below
            result = subprocess.CompletedProcess(query, returncode=1)
        lines = result.stdout.split() if result.returncode == 0 else []
        if found := frozenset(int(line.partition(".")[0]) for line in lines if line[0].isdigit()):
            return found
    if not torch.cuda.is_available():
        return frozenset()
    return frozenset(torch.cuda.get_device_capability(gpu)[0] for gpu in range(torch.cuda.device_count()))


def _installed(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None
