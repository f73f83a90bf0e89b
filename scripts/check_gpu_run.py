"""Say what a machine lacks for a training run on GPUs, before Ray starts: one ``error:`` line and exit code 2.

    python scripts/check_gpu_run.py --model PATH --rollout vllm --gpus-per-node 8 --nodes 1 -- [verl override ...]

Overrides count as in the run: they come last and win. What only the run can know is left to it: GPUs of other nodes,
and a model that is still to be downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from packaging.version import Version

EXIT_USER_ERROR = 2
# verl/third_party/vllm/__init__.py of verl 0.9.1 refuses what is older; its extra "vllm" names one version.
LOWEST_VLLM = "0.18.0"
VERLS_VLLM = "0.24.0"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")

ROLLOUT = "actor_rollout_ref.rollout.name"
GPUS_PER_NODE = "trainer.n_gpus_per_node"
NODES = "trainer.nnodes"
MODEL = "actor_rollout_ref.model.path"
TOKENIZER = "actor_rollout_ref.model.tokenizer_path"


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rollout", default="vllm")
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    overrides = last_overrides(args.overrides)
    try:
        check_model(overrides.get(MODEL, args.model), overrides.get(TOKENIZER))
        check_rollout(overrides.get(ROLLOUT, args.rollout))
        check_gpus(int(overrides.get(GPUS_PER_NODE, args.gpus_per_node)), int(overrides.get(NODES, args.nodes)))
    except MissingForGPURunError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
