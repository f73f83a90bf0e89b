"""Supervised batches, whose loss mask alone selects the labels, are exact with shared prefixes."""

import logging
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss

from tests.support import VOCAB, Result, assert_same, jagged, update
from verl_pg_plugin.engine.batch import read_sequences

LOSS = partial(sft_loss, config=None)

Row = tuple[list[int], list[int]]
"""Tokens and their loss mask."""


def make_samples() -> list[Row]:
    """Answers to one question, turns cut into samples, two turns in one sample, and samples without a label."""
    rng = np.random.default_rng(0)

    def text(length: int) -> list[int]:
        return rng.integers(VOCAB, size=length).tolist()

    system = text(30)
    question, context = system + text(9), system + text(4)
    samples = [(question + text(n), [0] * len(question) + [1] * n) for n in (5, 9, 7)]
    for _ in range(3):
        answer = text(6)
        samples.append((context + answer, [0] * len(context) + [1] * len(answer)))
        context = context + answer + text(3)
    samples.append(([*system, *text(18)], [0] * 33 + [1] * 4 + [0] * 5 + [1] * 6))
    return [*samples, (text(8), [0] * 8), (text(6), [1] * 6), (text(1), [0])]


def sft_batch(samples: list[Row], tokens: int = 1 << 30) -> TensorDict:
    fields = {
        "input_ids": jagged(torch.tensor(ids) for ids, _ in samples),
        "position_ids": jagged(torch.arange(len(ids)) for ids, _ in samples),
        "loss_mask": jagged(torch.tensor(mask) for _, mask in samples),
    }
    data = TensorDict(fields, batch_size=len(samples))
    flags = {"use_remove_padding": True, "use_dynamic_bsz": True}
    tu.assign_non_tensor(data, **flags, max_token_len_per_gpu=tokens, temperature=1.0)
    return data


def alone(path: str, samples: list[Row]) -> Result:
    """Loss and gradients of single sequences; nothing predicts their first tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    loss, count = torch.zeros(()), sum(sum(mask) for _, mask in samples)
    for ids, mask in samples:
        log_probs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        of_labels = log_probs.gather(-1, torch.tensor(ids)[1:, None]).squeeze(-1)
        loss = loss - (of_labels * torch.tensor(mask[1:])).sum() / count
    loss.backward()
    return Result({}, {name: p.grad for name, p in model.named_parameters()}, loss.item())


@pytest.mark.parametrize("tokens", [1 << 30, 70, 60])
def test_loss_and_gradients_match_single_sequences(packed: Any, qwen3: str, tokens: int, caplog) -> None:
    samples = make_samples()
    with caplog.at_level(logging.INFO, logger="verl_pg_plugin"):
        result = update(packed, sft_batch(samples, tokens), LOSS)
    assert_same(result, alone(qwen3, samples))
    said = r"shared prefixes: dedup ratio (\d+\.\d\d) \(tokens of all sequences over computed tokens\)"
    assert float(re.fullmatch(said, caplog.messages[-1])[1]) > 1.5
    assert not any("prefix_grouper" in name for name in result.metrics), "loggers of verl's SFT trainer take no lists"


def test_the_prompt_ends_before_the_first_label() -> None:
    masks = ([0, 0, 1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0, 1])
    samples = [([5] * len(mask), list(mask)) for mask in masks]
    assert read_sequences(sft_batch(samples)).prompt_lengths.tolist() == [2, 2, 1, 3]
