"""Assemble a split Llama checkpoint: the first layers of one Llama checkpoint, the last layers of another.

    python scripts/assemble_split_llama.py --first LLAMA_8B --first-layers 16 --last LLAMA_70B --last-layers 40 \
        --output SPLIT_LLAMA

Tensors are copied shard by shard, so memory holds one shard. The adapter between the two widths is random normal with
standard deviation 1 / sqrt(input width), which keeps the scale of hidden states.
"""

import argparse
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig

from verl_pg_plugin.models.split_llama import modeling_split_llama

AUTO_MAP = {
    "AutoConfig": "modeling_split_llama.SplitLlamaConfig",
    "AutoModelForCausalLM": "modeling_split_llama.SplitLlamaForCausalLM",
    "AutoModelForTokenClassification": "modeling_split_llama.SplitLlamaForValue",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")


@dataclass(frozen=True)
class Shard:
    """A safetensors file and the new names of its tensors that are copied."""

    path: Path
    renamed: dict[str, str]

    def load(self) -> dict[str, torch.Tensor]:
        with safe_open(self.path, framework="pt") as source:
            return {new: source.get_tensor(name) for name, new in self.renamed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=Path, required=True, help="Llama checkpoint (safetensors) of the lower layers")
    parser.add_argument("--first-layers", type=int, required=True, help="how many of its layers, from the bottom")
    parser.add_argument("--last", type=Path, required=True, help="Llama checkpoint (safetensors) of the upper layers")
    parser.add_argument("--last-layers", type=int, required=True, help="how many of its layers, from the top")
    parser.add_argument("--output", type=Path, required=True, help="folder to create; must not exist")
    args = parser.parse_args()
    try:
        num_tensors = assemble(args.first, args.first_layers, args.last, args.last_layers, args.output)
    except (ValueError, FileExistsError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    sys.stdout.write(f"{args.output}: {num_tensors} tensors; load it with trust_remote_code=True\n")


def assemble(first: Path, first_layers: int, last: Path, last_layers: int, output: Path) -> int:
    """Write the checkpoint and return the number of its tensors.

    Args:
        first, last: folders with ``config.json`` and safetensors of ``LlamaForCausalLM``.
        first_layers, last_layers: layers to take, from the bottom and from the top; at least 1.
        output: folder to create.
    """
    first_config, last_config = _llama_config(first, first_layers), _llama_config(last, last_layers)
    skipped = last_config.num_hidden_layers - last_layers
    first_config.num_hidden_layers, last_config.num_hidden_layers = first_layers, last_layers
    config = modeling_split_llama.SplitLlamaConfig(
        first_config, last_config, architectures=["SplitLlamaForCausalLM"], dtype=last_config.dtype, auto_map=AUTO_MAP
    )

    embedding, head, norm = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
    of_last = {norm: norm, head: head} | ({embedding: head} if last_config.tie_word_embeddings else {})
    shards = _renamed_shards(first, "first", range(first_layers), {embedding: embedding})
    shards += _renamed_shards(last, "last", range(skipped, skipped + last_layers), of_last)
    with torch.device("meta"):
        missing = set(modeling_split_llama.SplitLlamaForCausalLM(config).state_dict()) - {"model.adapter.weight"}
    missing -= {renamed for names in shards for renamed in names.renamed.values()}
    if missing:
        raise ValueError(f"the checkpoints lack {len(missing)} tensors, among them {min(missing)}")

    output.mkdir(parents=True)
    config.save_pretrained(output)
    shutil.copyfile(modeling_split_llama.__file__, output / "modeling_split_llama.py")
    for name in TOKENIZER_FILES:
        if (last / name).is_file():
            shutil.copyfile(last / name, output / name)
    generator = torch.Generator().manual_seed(0)
    width_in, width_out = first_config.hidden_size, last_config.hidden_size
    adapter = torch.randn(width_out, width_in, generator=generator) / width_in**0.5
    return _write(output, shards, {"model.adapter.weight": adapter.to(config.dtype or torch.float32)})


def _llama_config(folder: Path, num_layers: int) -> LlamaConfig:
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"{folder} is not a Llama checkpoint: model_type is {config.model_type!r}")
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise ValueError(f"{folder} has {config.num_hidden_layers} layers, cannot take {num_layers}")
    return config


def _renamed_shards(folder: Path, part: str, layers: range, kept: dict[str, str]) -> list[Shard]:
    """Return the shards with new names of the ``kept`` tensors and of those in ``layers``, for a part of the model."""
    shards = []
    for path in sorted(folder.glob("*.safetensors")):
        renamed = {}
        with safe_open(path, framework="pt") as source:
            for name in source.keys():  # noqa: SIM118
                layer = re.match(r"model\.layers\.(\d+)\.(.+)", name)
                if layer and int(layer[1]) in layers:
                    renamed[name] = f"model.{part}.layers.{int(layer[1]) - layers.start}.{layer[2]}"
                elif name in kept:
                    renamed[name] = kept[name]
        shards.append(Shard(path, renamed))
    if not shards:
        raise ValueError(f"{folder} has no .safetensors files; convert it with save_pretrained first")
    return [shard for shard in shards if shard.renamed]


def _write(output: Path, shards: list[Shard], extra: dict[str, torch.Tensor]) -> int:
    """Write one shard for each source shard, and their index."""
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate([None, *shards], start=1):
        tensors = extra if shard is None else shard.load()
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, output / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return len(weight_map)


if __name__ == "__main__":
    main()
