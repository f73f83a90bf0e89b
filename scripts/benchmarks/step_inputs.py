"""Inputs of the step benchmark: a checkpoint of a real shape with random weights, and prompts of one length.

The tokenizer has a word for every token id, so any sampled id decodes and prompts have exact lengths.
"""

import random
from pathlib import Path

import datasets
import torch
from data.whole_directory import whole_directory
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.shapes import SHAPES, config_of
from verl_pg_plugin.demo import END, PAD, START, UNKNOWN, with_chat_marks

MAX_POSITION_EMBEDDINGS = 1 << 17
DATA_SOURCE = "random_words"
# Words of the chat template. A newline is a token: verl's agent loop splits turns at it.
FIXED_WORDS = (PAD, UNKNOWN, START, END, "\n", "system", "user", "assistant")


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of ``vocab_size`` space-separated words: the chat template's, then ``w8``, ``w9``, ..."""
    words = [*FIXED_WORDS, *(f"w{index}" for index in range(len(FIXED_WORDS), vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("\n"), "isolated"), pre_tokenizers.Split(Regex(" "), "removed")]
    )
    return with_chat_marks(tokenizer)


def make_checkpoint(output_dir: Path, shape: str, dtype: torch.dtype, layers: int | None = None) -> Path:
    """Write random weights of ``SHAPES[shape]`` (or its first layers) and the word tokenizer; return the folder."""
    with whole_directory(output_dir) as scratch:
        tokenizer = word_tokenizer(SHAPES[shape]["vocab_size"])
        config = config_of(
            shape,
            max_position_embeddings=MAX_POSITION_EMBEDDINGS,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            **({"num_hidden_layers": layers} if layers else {}),
        )
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # on a CPU, 4B weights take minutes
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    return output_dir


def chat_of_length(tokenizer: PreTrainedTokenizerBase, length: int, rng: random.Random) -> list[dict[str, str]]:
    """Return a chat of random words that has exactly ``length`` tokens with the generation prompt."""

    def tokens(words: str) -> int:
        chat = [{"role": "user", "content": words}]
        return len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    num_words = length - tokens("")
    ids = rng.choices(range(len(FIXED_WORDS), len(tokenizer)), k=max(num_words, 0))
    words = " ".join(f"w{index}" for index in ids)
    if tokens(words) != length:
        raise ValueError(f"a prompt of {length} tokens is too short: the chat template takes {length - num_words}")
    return [{"role": "user", "content": words}]


def make_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, *, length: int, num_prompts: int) -> Path:
    """Write ``num_prompts`` distinct prompts of ``length`` tokens as a parquet file; return its path."""
    rng = random.Random(0)
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": chat_of_length(tokenizer, length, rng),
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(num_prompts)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path
