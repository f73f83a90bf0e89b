"""A tiny checkpoint with a character tokenizer, fitted for a few seconds to the task of ``arithmetic.py``."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from verl_pg_plugin.demo.arithmetic import PROBLEMS, chat

PAD, UNKNOWN, START, END = "<|endoftext|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, plus Qwen's chat markers; ``<|im_end|>`` ends a turn."""
    tokens = [PAD, UNKNOWN, START, END, *dict.fromkeys(string.printable)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return with_chat_marks(tokenizer)


def with_chat_marks(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer that knows the marks as transformers takes it, with the chat template."""
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
    """Random float32 weights: 2 layers, hidden 128, 4 query heads of 32 over 2 key/value heads; ``sizes`` win."""
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
    """Fit the answers in place, ``steps`` of AdamW on 32 questions each, so that the reward starts above zero.

    ``reply(question, answer)`` gives other texts behind a prompt, each with whether the model is fitted to it.
    Three quarters of the steps see the question without the preamble of ``length``: attention finds two digits among
    thirty characters much sooner than among hundreds, and rotary positions carry what it found over to the full prompt.
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
            fitted = zip(ids, texts, strict=True)
            labels.append(torch.cat([part if fit else torch.full_like(part, -100) for part, (_, fit) in fitted]))
        # Right padding needs no mask: a causal model's answers never see it, and its labels are ignored.
        model(input_ids=pad_sequence(sequences, True), labels=pad_sequence(labels, True, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
