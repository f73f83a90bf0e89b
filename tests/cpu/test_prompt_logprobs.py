"""A teacher served by the rollout ``hf`` says of a sequence what its model says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cpu.test_server import ask, make_server

SEQUENCES = [[10, 11, 12, 13, 14], [10, 11, 40], list(range(20, 32))]


@pytest.mark.parametrize("k", [0, 3])
def test_prompt_logprobs_are_those_of_the_model_in_verls_order(checkpoint: Path, k: int) -> None:
    async def scenario() -> list[Any]:
        server = make_server(checkpoint)
        sent = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k, "detokenize": False}
        return await asyncio.gather(*(ask(server, sequence, **sent) for sequence in SEQUENCES))

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for sequence, output in zip(SEQUENCES, asyncio.run(scenario()), strict=True):
        log_probs = model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        expected = log_probs.topk(k) if k else None
        ids = torch.tensor(output.extra_fields["prompt_ids"])
        found = torch.tensor(output.extra_fields["prompt_logprobs"])
        assert ids.shape == found.shape == (len(sequence), max(k, 1))
        if expected is None:
            assert ids[:-1, 0].tolist() == sequence[1:]
        else:
            torch.testing.assert_close(found[:-1], expected.values)
        torch.testing.assert_close(found[:-1], log_probs.gather(1, ids[:-1]))
        assert not found[-1].any()
        assert len(output.token_ids) == 1


def test_other_requests_carry_nothing_of_the_prompt(checkpoint: Path) -> None:
    assert "prompt_logprobs" not in asyncio.run(ask(make_server(checkpoint))).extra_fields
