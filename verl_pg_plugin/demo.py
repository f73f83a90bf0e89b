"""A task that trains on a CPU in seconds: sums of two small numbers, and a tiny pretrained checkpoint.

The data set has verl's RL format; the checkpoint has a character tokenizer.
"""

import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SYSTEM_PROMPT = "You add two numbers. Reply with the sum in digits and nothing else: no words, no spaces, no signs."
PROBLEMS = [(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(5)]
"""All questions and answers."""

PAD, UNKNOWN, START, END = "<|endoftext|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(question: str, length: int = 0) -> list[dict[str, str]]:
    """Return a question's messages. A system message of ``length`` > 0 characters begins with the question."""
    system = f"{question} {SYSTEM_PROMPT} ".ljust(length, ".")[:length] if length else SYSTEM_PROMPT
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def write_data(folder: Path, *, test_size: int = 5, repeat: int = 32, length: int = 0) -> None:
    """Write ``train.parquet``, each question ``repeat`` times, and ``test.parquet``."""
    problems = random.Random(0).sample(PROBLEMS, len(PROBLEMS))
    for split, chosen in {"train": problems[test_size:] * repeat, "test": problems[:test_size]}.items():
        rows = [
            {
                "data_source": "arithmetic",
                "prompt": chat(question, length),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"split": split, "index": index, "question": question},
            }
            for index, (question, answer) in enumerate(chosen)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Score the last turn of a response in [0, 1], for verl's ``reward.custom_reward_function``.

    0.2 x fraction of digits, 0.3 x fraction of matching positions, 0.5 for the exact answer, so that a tiny model is
    rewarded before its first correct answer.
    """
    response = solution_str.rpartition("assistant\n")[2]  # each turn begins with it
    if not response:
        return 0.0
    digits = sum(character in "0123456789" for character in response) / len(response)
    agreeing = sum(a == b for a, b in zip(response, ground_truth, strict=False))
    places = agreeing / max(len(response), len(ground_truth))
    return 0.2 * digits + 0.3 * places + 0.5 * (response == ground_truth)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of printable ASCII characters and Qwen's chat markers; ``<|im_end|>`` ends a turn."""
    tokens = [PAD, UNKNOWN, START, END, *dict.fromkeys(string.printable)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return with_chat_marks(tokenizer)


def with_chat_marks(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer with the chat template from one that has the chat markers."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast, architecture: str = "qwen3", **sizes: Any) -> PreTrainedModel:
    """Return a model with random float32 weights; ``sizes`` override the config below."""
    config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **(config | sizes)))


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    *,
    seed: int = 0,
    reply: Callable[[str, str], list[tuple[str, bool]]] | None = None,
    length: int = 0,
) -> None:
    """Train in place, ``steps`` of AdamW on 32 questions each, so that the reward starts above zero.

    ``reply(question, answer)`` returns the texts after a prompt, each with a flag to train on it. Three quarters of the
    steps omit the system message: attention locates two digits faster among thirty characters than among hundreds.
    """
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=1e-3), random.Random(seed)
    for step in range(steps):
        sequences, labels = [], []
        for question, answer in rng.choices(PROBLEMS, k=32):
            messages = chat(question, length)[1 if step < 0.75 * steps else 0 :]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            texts = [(prompt, False), *(reply(question, answer) if reply else [(answer + END, True)])]
            ids = [torch.tensor(tokenizer(text, add_special_tokens=False).input_ids) for text, _ in texts]
            sequences.append(torch.cat(ids))
            parts = zip(ids, texts, strict=True)
            labels.append(torch.cat([part if fit else torch.full_like(part, -100) for part, (_, fit) in parts]))
        # Right padding needs no mask in a causal model.
        model(input_ids=pad_sequence(sequences, True), labels=pad_sequence(labels, True, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
