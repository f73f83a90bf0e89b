"""Gated DeltaNet as a mixer, and whether this machine computes the gated delta rule and its backward rightly.

On a GPU the recurrence needs the kernels of fla: transformers' own fallback pads segments to equal lengths and steps
through them on the host. With Triton 3.4 to 3.7.0 the gated backward is wrong on Hopper
(https://github.com/fla-org/flash-linear-attention/issues/640), unless tilelang is installed, which fla then takes.
"""

from importlib.util import find_spec

import torch
from packaging.version import Version
from transformers import PretrainedConfig

from verl_pg_plugin.attention.kernels import gpus
from verl_pg_plugin.mixers.attention import layer_types
from verl_pg_plugin.mixers.delta_layer import GATED_DELTA, install
from verl_pg_plugin.mixers.mixer import Mixer

LINEAR = "linear_attention"
TEXT_MODEL_TYPES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
MULTIMODAL_MODEL_TYPES = frozenset({"qwen3_5", "qwen3_5_moe"})


def obstacles(config: PretrainedConfig) -> list[str]:
    if config.model_type in TEXT_MODEL_TYPES:
        return []
    known = ", ".join(sorted(TEXT_MODEL_TYPES))
    return [f"{config.model_type} has linear attention that is not known to be Gated DeltaNet, as {known}"]


def kernel_obstacles(device_name: str) -> list[str]:
    """Why Gated DeltaNet cannot run on this machine, with the command that changes it; empty if it can, as on a CPU."""
    if device_name != "cuda":
        return []
    if find_spec("fla") is None:
        needed = "Gated DeltaNet needs the kernels of flash-linear-attention, which is not installed"
        return [f"{needed}: pip install fla-core"]
    import triton

    wrong = Version("3.4") <= Version(triton.__version__) < Version("3.7.1")
    if wrong and find_spec("tilelang") is None and 9 in gpu_generations():
        why = f"wrong on Hopper with Triton 3.4 to 3.7.0 (here {triton.__version__})"
        fix = "pip install --no-deps 'triton>=3.7.1', or pip install tilelang"
        return [f"the backward of the gated delta rule is {why}: {fix}"]
    return []


def ulysses_obstacle(config: PretrainedConfig, ranks: int) -> str:
    """Each rank gets whole key heads with the value heads that read them."""
    heads = config.linear_num_key_heads
    return f"{heads} key heads cannot be spread over {ranks} ranks" if heads % ranks else ""


def token_flops(config: PretrainedConfig) -> float:
    """The recurrence with a K x V state per head: two FLOPs per number to read it, to correct it, to query it.

    The chunked kernels multiply more, to be faster; that is how they compute and not what a token needs. There are no
    pairs: a token reads a state of fixed size, however many tokens are before it.
    """
    return 6.0 * state_sizes(config)[0]


def state_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """A K x V matrix per head of values, and the tokens that the convolution sees in front of its own."""
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
"""The linear attention layers of Qwen3-Next and Qwen3.5."""


def gpu_generations() -> frozenset[int]:
    """Major compute capabilities of this machine's GPUs; ``nvidia-smi`` tells them without a CUDA context."""
    told = [] if torch.cuda.is_initialized() else [gpu.split(", ")[2] for gpu in gpus()]
    if found := frozenset(int(capability.partition(".")[0]) for capability in told if capability[0].isdigit()):
        return found
    if not torch.cuda.is_available():
        return frozenset()
    return frozenset(torch.cuda.get_device_capability(gpu)[0] for gpu in range(torch.cuda.device_count()))
