"""Say what a machine lacks for a training run on GPUs, before Ray starts: one ``error:`` line and exit code 2.

    python scripts/check_gpu_run.py --model PATH --rollout vllm --gpus-per-node 8 --nodes 1 \
        --use-prefix-grouper True --use-remove-padding True -- [verl override ...]

Overrides count as in the run: they come last and win. Attention is tried out, forward and backward, with heads of the
model's width: a package may be installed and lack their kernels. What only the run can know is left to it: GPUs of
other nodes, and a model that is still to be downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from packaging.version import Version

from verl_pg_plugin.attention.kernels import VarlenAttention, select_kernel

EXIT_USER_ERROR = 2
DEVICE = "cuda"
# verl/third_party/vllm/__init__.py of verl 0.9.1 refuses what is older; its extra "vllm" names one version.
LOWEST_VLLM = "0.18.0"
VERLS_VLLM = "0.24.0"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")

ROLLOUT = "actor_rollout_ref.rollout.name"
GPUS_PER_NODE = "trainer.n_gpus_per_node"
NODES = "trainer.nnodes"
MODEL = "actor_rollout_ref.model.path"
TOKENIZER = "actor_rollout_ref.model.tokenizer_path"
USE_PREFIX_GROUPER = "actor_rollout_ref.actor.use_prefix_grouper"
USE_REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"
KERNEL = "prefix_grouper.attention_kernel"
MODEL_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
# What verl asks transformers for, unless MODEL_ATTENTION says otherwise.
VERLS_ATTENTION = "flash_attention_2"


class MissingForGPURunError(Exception):
    """What is missing and how to get it, in one line."""


def last_overrides(overrides: list[str]) -> dict[str, str]:
    """The value of every key that is set; Hydra's ``+`` and ``++`` do not change a key."""
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    return {key: value.strip("'\"") for key, equals, value in pairs if equals}


def check_rollout(name: str) -> None:
    """The rollout engine is installed, in a version that verl takes."""
    if name != "vllm":
        return
    advice = f"pip install vllm=={VERLS_VLLM} (the version of verl's own extra), or set ROLLOUT to an engine you have"
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        raise MissingForGPURunError(f"vLLM is not installed in {sys.prefix}: {advice}") from None
    if Version(installed) < Version(LOWEST_VLLM):
        raise MissingForGPURunError(f"vLLM {installed} is older than verl's lowest, {LOWEST_VLLM}: {advice}")


def check_gpus(gpus_per_node: int, nodes: int) -> None:
    """This machine has the GPUs of the run; a run on a Ray cluster finds its own."""
    if nodes > 1 or os.environ.get("RAY_ADDRESS"):
        return
    visible = torch.cuda.device_count()
    if visible == 0:
        raise MissingForGPURunError(
            f"no GPU is visible to torch {torch.__version__} (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}): run where nvidia-smi lists one, with a torch built "
            "for CUDA; or unset MODEL_PATH, TRAIN_FILES and VAL_FILES for the run on a CPU"
        )
    if visible < gpus_per_node:
        raise MissingForGPURunError(
            f"the run wants {gpus_per_node} GPUs and {visible} are visible: set NGPUS_PER_NODE={visible}"
        )


def check_model(model: str, tokenizer: str | None) -> None:
    """A model folder on this machine has a config and a tokenizer; names of a hub are left to transformers."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if model.startswith(("/", "./", "../", "~")):
            raise MissingForGPURunError(f"model folder {model} does not exist: correct MODEL_PATH")
        return
    if not (folder / "config.json").is_file():
        raise MissingForGPURunError(f"model folder {model} has no config.json: set MODEL_PATH to a checkpoint")
    source = Path(tokenizer).expanduser() if tokenizer else folder
    if source.is_dir() and not any((source / name).is_file() for name in TOKENIZER_FILES):
        raise MissingForGPURunError(
            f"{source} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}), which the rollout needs: save one "
            f"there with tokenizer.save_pretrained, or add the override {TOKENIZER}=FOLDER"
        )


def read_head_dim(model: str) -> int | None:
    """Numbers of a query head; None where no config is at hand, or it names no heads."""
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    config = config.get("text_config", config)
    if config.get("head_dim"):
        return config["head_dim"]
    heads = config.get("num_attention_heads")
    return config["hidden_size"] // heads if heads else None


def check_attention(
    head_dim: int, *, packed: bool, kernel: str = "auto", model_attention: str = VERLS_ATTENTION
) -> None:
    """The attention kernel of the run computes heads of this width on this GPU, forward and backward.

    Args:
        head_dim: numbers of a head.
        packed: whether this plugin attends (packed mode) or transformers does, through flash-attn 2.
        kernel: the plugin's kernel by name.
        model_attention: what transformers is asked for; only flash-attn 2 is tried.
    """
    if not packed and model_attention != VERLS_ATTENTION:
        return
    setting = f"{KERNEL}=torch_varlen" if packed else f"+{MODEL_ATTENTION}=sdpa"
    try:
        chosen = select_kernel(kernel if packed else "flash_attn_2", DEVICE)
        error = error_of_attention(chosen.attend, head_dim)
    except (RuntimeError, ValueError, AssertionError) as raised:  # flash-attn 4 asserts
        raise MissingForGPURunError(f"{raised}; or add the override {setting}".replace("\n", " ")) from raised
    if not error < 1e-2:
        raise MissingForGPURunError(
            f"{chosen.name} is wrong by {error:.3g} with heads of {head_dim} numbers: this build has no kernel for "
            f"them; install one that has, or add the override {setting}"
        )


def error_of_attention(attend: VarlenAttention, head_dim: int) -> float:
    """Largest error of one token that attends to itself: the output is its value, the value's gradient is one."""
    q, k, v = (torch.rand(1, 1, head_dim, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 1], device=DEVICE, dtype=torch.int32)
    out = attend(q, k, v, offsets, offsets, 1, 1, softmax_scale=1.0)
    out.sum().backward()
    return max((out - v).abs().max().item(), (v.grad - 1).abs().max().item())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rollout", default="vllm")
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--use-prefix-grouper", default="True")
    parser.add_argument("--use-remove-padding", default="True")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    overrides = last_overrides(args.overrides)

    def is_set(key: str, default: str) -> bool:
        return overrides.get(key, default).lower() == "true"

    model = overrides.get(MODEL, args.model)
    nodes = int(overrides.get(NODES, args.nodes))
    shared = is_set(USE_PREFIX_GROUPER, args.use_prefix_grouper)
    unpadded = is_set(USE_REMOVE_PADDING, args.use_remove_padding)
    try:
        check_model(model, overrides.get(TOKENIZER))
        check_rollout(overrides.get(ROLLOUT, args.rollout))
        check_gpus(int(overrides.get(GPUS_PER_NODE, args.gpus_per_node)), nodes)
        head_dim = read_head_dim(model)
        if head_dim is not None and torch.cuda.is_available():
            check_attention(
                head_dim,
                packed=shared and unpadded,
                kernel=overrides.get(KERNEL, "auto"),
                model_attention=overrides.get(MODEL_ATTENTION, VERLS_ATTENTION),
            )
    except MissingForGPURunError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
