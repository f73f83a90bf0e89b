"""Write a tiny checkpoint with a character tokenizer, for training on a CPU.

    python scripts/make_tiny_checkpoint.py --output-dir DIR [--architecture qwen3_moe] [--warm-up-steps N] \
        [--head-dim 32] [--tool-calls] [--seed 0]

The weights are random, then trained for a few seconds on the questions of ``make_arithmetic_data.py`` (supervised,
answer tokens only), so that the reward starts above zero. ``--warm-up-steps 0`` leaves them random. GPU kernels need
``--head-dim 64``. With ``--tool-calls`` the answer is a call of the tool in ``data/calculator_tool.py``, then its
result.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from data.whole_directory import whole_directory

from verl_pg_plugin.demo import END, START, character_tokenizer, tiny_model, warm_up

HEAD_DIM = 32
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
"""Additional arguments of ``tiny_model``, by model type."""
# As in Qwen3, tokens that decoding keeps: verl's parser searches the text for them.
TOOL_CALL_MARKS = ["<tool_call>", "</tool_call>"]


def answer_by_tool(question: str, answer: str) -> list[tuple[str, bool]]:
    """Return the texts after a prompt (call of ``add``, its result, answer), and whether the model writes each."""
    a, b = question.rstrip("=").split("+")
    call = json.dumps({"name": "add", "arguments": {"a": int(a), "b": int(b)}}, separators=(",", ":"))
    return [
        (call.join(TOOL_CALL_MARKS) + END, True),
        (f"\n{START}tool\n{answer}{END}\n{START}assistant\n", False),
        (answer + END, True),
    ]


def make_tiny_checkpoint(
    output_dir: Path,
    *,
    architecture: str = "qwen3",
    warm_up_steps: int | None = None,
    head_dim: int = HEAD_DIM,
    tool_calls: bool = False,
    seed: int = 0,
    vocab_multiple: int = 1,
) -> Path:
    """Write model and tokenizer to ``output_dir`` and return it; SystemExit if it is not empty.

    Args:
        warm_up_steps: 80 by default, 300 with tool calls.
        vocab_multiple: pads the embedding to a multiple of this; vLLM's adapters of the head need 64.
    """
    torch.manual_seed(seed)
    tokenizer = character_tokenizer()
    if tool_calls:
        tokenizer.add_tokens(TOOL_CALL_MARKS)
    vocab_size = -(-len(tokenizer) // vocab_multiple) * vocab_multiple
    sizes = ARCHITECTURES[architecture] | {"head_dim": head_dim, "vocab_size": vocab_size}
    model = tiny_model(tokenizer, architecture, **sizes)
    if warm_up_steps is None:
        warm_up_steps = 300 if tool_calls else 80
    warm_up(model, tokenizer, warm_up_steps, seed=seed, reply=answer_by_tool if tool_calls else None)
    with whole_directory(output_dir) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    return output_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3")
    parser.add_argument("--warm-up-steps", type=int, help="default: 80, or 300 with --tool-calls")
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM)
    parser.add_argument("--tool-calls", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    sys.stdout.write(f"{make_tiny_checkpoint(args.pop('output_dir'), **args)}\n")


if __name__ == "__main__":
    main()
