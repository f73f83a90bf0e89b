"""Write a tiny checkpoint with a character tokenizer, for training on a CPU.

    python scripts/make_tiny_checkpoint.py --output-dir DIR [--architecture qwen3] [--warm-up-steps 80] [--seed 0]

The weights are random, then fitted for a few seconds on the arithmetic questions of ``make_arithmetic_data.py``
(supervised, answer tokens only). Without this warm-up a random model hardly ever draws a right answer and RL
spends its first minutes on the format; with it the reward starts low, above zero, and RL does the rest.
``--warm-up-steps 0`` leaves the weights random.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
from pathlib import Path
from typing import Any

import torch
from data.whole_directory import whole_directory
from make_arithmetic_data import MAX_NUMBER, chat, problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

PAD, UNKNOWN, START, END = "<|endoftext|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, plus Qwen's chat markers; ``<|im_end|>`` ends a turn."""
    tokens = [PAD, UNKNOWN, START, END, *dict.fromkeys(string.printable)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
"""What each architecture has beside ``SIZES``, by model type."""


def tiny_model(architecture: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Random float32 weights: 2 layers, hidden 128, 4 query heads over 2 key/value heads."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
        **{**SIZES, **ARCHITECTURES[architecture]},
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: int, rng: random.Random) -> None:
    """Fit the answers of random questions in place: ``steps`` AdamW steps on 32 rows each.

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
            prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
            answer_ids = tokenizer(answer + END, add_special_tokens=False).input_ids
            rows.append(torch.tensor(prompt_ids + answer_ids))
            labels.append(torch.tensor([-100] * len(prompt_ids) + answer_ids))
        # Right padding needs no mask: a causal model's answer rows never see it, and its labels are ignored.
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, True, tokenizer.pad_token_id)
        loss = model(input_ids=input_ids, labels=torch.nn.utils.rnn.pad_sequence(labels, True, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def make_tiny_checkpoint(
    output_dir: Path, *, architecture: str = "qwen3", warm_up_steps: int = 80, seed: int = 0
) -> Path:
    """Write model, generation config and tokenizer to ``output_dir`` and return it.

    Raises:
        FileExistsError: ``output_dir`` is not empty.
    """
    torch.manual_seed(seed)
    tokenizer = character_tokenizer()
    model = tiny_model(architecture, tokenizer)
    warm_up(model, tokenizer, warm_up_steps, random.Random(seed))
    with whole_directory(output_dir) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    return output_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3")
    parser.add_argument("--warm-up-steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    try:
        sys.stdout.write(f"{make_tiny_checkpoint(args.pop('output_dir'), **args)}\n")
    except FileExistsError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
