"""Gated DeltaNet as a mixer, and checks that this machine computes it correctly.

A GPU needs fla's kernels: transformers' fallback pads segments to one length and loops over chunks on the host. With
Triton 3.4 to 3.7.0 fla's gated backward is wrong on Hopper, unless fla uses an installed tilelang
(https://github.com/fla-org/flash-linear-attention/issues/640).
"""

from importlib.util import find_spec

import torch
from packaging.version import Version
from transformers import PretrainedConfig

from verl_pg_plugin.attention.kernels import gpus
from verl_pg_plugin.mixers.delta_layer import GATED_DELTA, install
from verl_pg_plugin.mixers.layer_types import LINEAR, layer_types
from verl_pg_plugin.mixers.mixer import Mixer

TEXT_MODEL_TYPES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
MULTIMODAL_MODEL_TYPES = frozenset({"qwen3_5", "qwen3_5_moe"})


def obstacles(config: PretrainedConfig) -> list[str]:
    if config.model_type in TEXT_MODEL_TYPES:
        return []
    known = ", ".join(sorted(TEXT_MODEL_TYPES))
    return [f"{config.model_type} has linear attention that is not known to be Gated DeltaNet, as {known}"]


def kernel_obstacles(device_name: str) -> list[str]:
    """Return why Gated DeltaNet cannot run on this machine, with the command that fixes it; empty if it can."""
    if device_name != "cuda":
        return []
    if find_spec("fla") is None:
        return ["Gated DeltaNet needs the kernels of flash-linear-attention, not installed: pip install fla-core"]
    import triton

    wrong = Version("3.4") <= Version(triton.__version__) < Version("3.7.1")
    if wrong and find_spec("tilelang") is None and 9 in gpu_generations():
        why = f"the backward of the gated delta rule is wrong on Hopper with Triton 3.4 to 3.7.0 ({triton.__version__})"
        return [f"{why}: pip install --no-deps 'triton>=3.7.1', or pip install tilelang"]
    return []


def ulysses_obstacle(config: PretrainedConfig, ranks: int) -> str:
    """Return why ranks cannot get equally many key heads (each with its value heads)."""
    heads = config.linear_num_key_heads
    return f"{heads} key heads cannot be spread over {ranks} ranks" if heads % ranks else ""


def token_flops(config: PretrainedConfig) -> float:
    """FLOPs of the recurrence (not of chunked kernels): two each to read, update and query an element of the state."""
    return 6.0 * state_sizes(config)[0]


def state_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Elements of the K x V states of all value heads, and of the convolution's last W - 1 inputs."""
    layers = layer_types(config).count(LINEAR)
    values = config.linear_num_value_heads * config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    return layers * config.linear_key_head_dim * values, layers * (config.linear_conv_kernel_dim - 1) * channels


MIXER = Mixer(
    name=GATED_DELTA,
    layer_types=frozenset({LINEAR}),
    obstacles=obstacles,
    machine_obstacles=kernel_obstacles,
    install=install,
    state_sizes=state_sizes,
    token_flops=token_flops,
    ulysses_obstacle=ulysses_obstacle,
    stateful_model_types=TEXT_MODEL_TYPES | MULTIMODAL_MODEL_TYPES,
    prefix_cache=True,
)


def gpu_generations() -> frozenset[int]:
    """Return the major compute capabilities of this machine's GPUs; ``nvidia-smi`` needs no CUDA context."""
    capabilities = [] if torch.cuda.is_initialized() else [gpu.split(", ")[2] for gpu in gpus()]
    if majors := frozenset(int(value.partition(".")[0]) for value in capabilities if value[0].isdigit()):
        return majors
    if not torch.cuda.is_available():
        return frozenset()
    return frozenset(torch.cuda.get_device_capability(gpu)[0] for gpu in range(torch.cuda.device_count()))
