"""Write a tiny checkpoint with a character tokenizer, for training on a CPU.

    python scripts/make_tiny_checkpoint.py --output-dir DIR [--architecture qwen3_moe] [--warm-up-steps 80] \
        [--head-dim 32] [--tool-calls] [--seed 0]

The weights are random, then fitted for a few seconds on the arithmetic questions of ``make_arithmetic_data.py``
(supervised, answer tokens only). Without this warm-up a random model hardly ever draws a right answer and RL
spends its first minutes on the format; with it the reward starts low, above zero, and RL does the rest.
``--warm-up-steps 0`` leaves the weights random; GPU kernels want ``--head-dim 64``.
With ``--tool-calls`` the answer is a call of the tool in ``data/calculator_tool.py``, then the number it returns; give
that 300 warm-up steps, since a call is one only when all of its characters are right.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data.whole_directory import whole_directory
from make_arithmetic_data import MAX_NUMBER, chat, problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

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
"""Sizes beside those of ``tiny_model``, by model type."""
PAD, UNKNOWN, START, END = "<|endoftext|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
# As in Qwen3: tokens of their own that decoding keeps, since verl's parser looks for them in the text.
TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def character_tokenizer(*, tool_calls: bool = False) -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, plus Qwen's chat markers; ``<|im_end|>`` ends a turn.

    ``tool_calls`` adds the two marks around a tool call.
    """
    tokens = [PAD, UNKNOWN, START, END, *dict.fromkeys(string.printable)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    if tool_calls:
        fast.add_tokens([TOOL_CALL_START, TOOL_CALL_END])
    return fast


def tiny_model(
    tokenizer: PreTrainedTokenizerFast, architecture: str, head_dim: int, vocab_multiple: int = 1
) -> PreTrainedModel:
    """Random float32 weights: 2 layers, hidden 128, 4 query heads over 2 key/value heads."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=-(-len(tokenizer) // vocab_multiple) * vocab_multiple,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
        **ARCHITECTURES[architecture],
    )
    return AutoModelForCausalLM.from_config(config)


def plain_answer(question: str, answer: str) -> list[tuple[str, bool]]:
    """What follows a prompt, as texts with whether the model writes them (and is fitted to): the answer."""
    return [(answer + END, True)]


def answer_by_tool(question: str, answer: str) -> list[tuple[str, bool]]:
    """The same with a call of the tool ``add`` and its result in front of the answer."""
    a, b = question.rstrip("=").split("+")
    call = json.dumps({"name": "add", "arguments": {"a": int(a), "b": int(b)}}, separators=(",", ":"))
    return [
        (f"{TOOL_CALL_START}{call}{TOOL_CALL_END}{END}", True),
        (f"\n{START}tool\n{answer}{END}\n{START}assistant\n", False),
        (answer + END, True),
    ]


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    rng: random.Random,
    reply: Callable[[str, str], list[tuple[str, bool]]],
) -> None:
    """Fit the replies to random questions in place: ``steps`` AdamW steps on 32 samples each.

    Three quarters of the steps see the question without the preamble: attention finds two digits among thirty
    characters much sooner than among hundreds, and rotary positions carry what it found over to the full prompt.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    questions = problems(MAX_NUMBER)
    for step in range(steps):
        first_message = 1 if step < 0.75 * steps else 0
        rows, labels = [], []
        for question, answer in rng.choices(questions, k=32):
            messages = chat(question)[first_message:]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            row: list[int] = []
            label: list[int] = []
            for text, fitted in [(prompt, False), *reply(question, answer)]:
                ids = tokenizer(text, add_special_tokens=False).input_ids
                row += ids
                label += ids if fitted else [-100] * len(ids)
            rows.append(torch.tensor(row))
            labels.append(torch.tensor(label))
        # Right padding needs no mask: a causal model's answers never see it, and its labels are ignored.
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, True, tokenizer.pad_token_id)
        loss = model(input_ids=input_ids, labels=torch.nn.utils.rnn.pad_sequence(labels, True, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def make_tiny_checkpoint(
    output_dir: Path,
    *,
    architecture: str = "qwen3",
    warm_up_steps: int = 80,
    head_dim: int = HEAD_DIM,
    tool_calls: bool = False,
    seed: int = 0,
    vocab_multiple: int = 1,
) -> Path:
    """Write model, generation config and tokenizer to ``output_dir`` and return it.

    Args:
        vocab_multiple: the embedding gets as many rows more as make it a multiple of this. vLLM's adapters of the head
            need 64, as released models have.

    Raises:
        FileExistsError: ``output_dir`` is not empty.
    """
    torch.manual_seed(seed)
    tokenizer = character_tokenizer(tool_calls=tool_calls)
    model = tiny_model(tokenizer, architecture, head_dim, vocab_multiple)
    reply = answer_by_tool if tool_calls else plain_answer
    warm_up(model, tokenizer, warm_up_steps, random.Random(seed), reply)
    with whole_directory(output_dir) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    return output_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3")
    parser.add_argument("--warm-up-steps", type=int, default=80)
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM)
    parser.add_argument("--tool-calls", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    try:
        sys.stdout.write(f"{make_tiny_checkpoint(args.pop('output_dir'), **args)}\n")
    except FileExistsError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
