"""The generation server as verl uses it: batching, abort and resume, weights, errors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from verl.workers.config import HFModelConfig, RolloutConfig

from verl_pg_plugin.cpu.server import HFServer

PROMPT = [10, 11, 12, 13]


def make_server(checkpoint: Path, **config: Any) -> HFServer:
    defaults = {
        "name": "hf",
        "dtype": "float32",
        "load_format": "auto",
        "prompt_length": 32,
        "response_length": 16,
        "tensor_model_parallel_size": 1,
    }
    return HFServer(RolloutConfig(**{**defaults, **config}), HFModelConfig(path=str(checkpoint)), replica_rank=0)


def ask(server: HFServer, prompt: list[int] = PROMPT, **params: Any) -> Any:
    return server.generate(prompt_ids=prompt, sampling_params={"ignore_eos": True, **params}, request_id="r")


def test_concurrent_requests_each_get_their_own_response(checkpoint: Path) -> None:
    async def scenario() -> list[Any]:
        server = make_server(checkpoint)
        prompts = [[10 + index, 11] for index in range(6)]
        together = await asyncio.gather(*(ask(server, prompt, temperature=0) for prompt in prompts))
        alone = [await ask(server, prompt, temperature=0) for prompt in prompts]
        return [(a.token_ids, b.token_ids, a.stop_reason) for a, b in zip(together, alone, strict=True)]

    for together, alone, stop_reason in asyncio.run(scenario()):
        assert together == alone
        assert len(together) == 16
        assert stop_reason == "completed"


def test_more_requests_than_max_num_seqs_are_all_answered(checkpoint: Path) -> None:
    async def scenario() -> list[int]:
        server = make_server(checkpoint, max_num_seqs=3)
        return [len(output.token_ids) for output in await asyncio.gather(*(ask(server) for _ in range(8)))]

    assert asyncio.run(scenario()) == [16] * 8


def test_a_response_never_outgrows_the_context(checkpoint: Path) -> None:
    async def scenario() -> list[int]:
        server = make_server(checkpoint, max_model_len=10)
        outputs = await asyncio.gather(ask(server), ask(server, max_tokens=50), ask(server, max_new_tokens=2))
        return [len(output.token_ids) for output in outputs]

    assert asyncio.run(scenario()) == [6, 6, 2]


def test_an_aborted_request_resumes_to_the_response_it_would_have_been(checkpoint: Path) -> None:
    """verl's partial rollout: resend prompt plus tokens so far once generation is open again."""

    async def scenario() -> tuple[list[int], list[int], list[str]]:
        server = make_server(checkpoint, response_length=400)
        await server.set_global_steps(7)
        whole = await ask(server, temperature=0)
        request = asyncio.create_task(ask(server, temperature=0))
        while not server._model_lock.locked():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        report = await server.abort_all_requests()
        partial = await request
        assert report == {"aborted_count": 1}
        assert partial.extra_fields["global_steps"] == 7
        parked = asyncio.create_task(
            ask(server, PROMPT + partial.token_ids, temperature=0, max_tokens=400 - len(partial.token_ids))
        )
        await asyncio.sleep(0.1)
        assert not parked.done()
        await server.resume_generation()
        rest = await parked
        tokens = partial.token_ids + rest.token_ids
        return whole.token_ids, tokens, [partial.stop_reason, rest.stop_reason]

    whole, resumed, stop_reasons = asyncio.run(scenario())
    assert resumed == whole
    assert stop_reasons == ["aborted", "completed"]


def test_a_rejecting_gate_answers_at_once_with_an_aborted_response(checkpoint: Path) -> None:
    async def scenario() -> Any:
        server = make_server(checkpoint)
        await server.abort_all_requests(reject_request=True)
        return await ask(server)

    output = asyncio.run(scenario())
    assert output.stop_reason == "aborted"
    assert output.token_ids == []


def test_updated_weights_are_the_ones_that_sample(checkpoint: Path, model: PreTrainedModel) -> None:
    """The server starts from noise; after the update its log-probs are the trained model's."""

    async def scenario() -> Any:
        server = make_server(checkpoint, load_format="dummy")
        with pytest.raises(RuntimeError, match="before the trainer's first update_weights"):
            await ask(server)
        for name, tensor in model.state_dict().items():
            await server.update_weights({name: tensor})
        return await ask(server)

    output = asyncio.run(scenario())
    row = torch.tensor([PROMPT + output.token_ids])
    with torch.no_grad():
        log_probs_RV = model(row).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = log_probs_RV.gather(1, row[:, len(PROMPT) :].T)[:, 0].tolist()
    assert output.log_probs == pytest.approx(expected, abs=1e-5)


def test_weights_the_model_does_not_have_are_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(RuntimeError, match=r"lora_A.*lora\.merge=True"):
        asyncio.run(make_server(checkpoint).update_weights({"layers.0.lora_A": torch.zeros(1)}))


def test_one_bad_request_fails_alone(checkpoint: Path) -> None:
    async def scenario() -> list[Any]:
        server = make_server(checkpoint)
        return await asyncio.gather(ask(server), ask(server, []), ask(server, min_p=0.5), return_exceptions=True)

    good, empty, unknown = asyncio.run(scenario())
    assert len(good.token_ids) == 16
    assert "at least one token" in str(empty)
    assert "min_p" in str(unknown)


def test_images_are_refused_because_they_would_be_ignored(checkpoint: Path) -> None:
    server = make_server(checkpoint)
    with pytest.raises(ValueError, match="no way to show qwen3 an image"):
        asyncio.run(server.generate(PROMPT, {}, "r", image_data=[object()], video_data=None))


def test_an_unknown_logprobs_mode_names_the_choices(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="processed_logprobs"):
        make_server(checkpoint, logprobs_mode="raw_logits")
