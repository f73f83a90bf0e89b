"""The rollout as verl uses it: seeds, abort and resume, weights, teachers, images, platform, and refusals."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from make_image_task import draw_squares, make_tiny_vision_checkpoint
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from verl.utils import hf_processor
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from tests.cpu.test_generation import assert_log_probs
from tests.fresh import run_fresh
from tests.support import save_tiny_model
from verl_pg_plugin.cpu.rollout import HFReplica, HFServer, ServerAdapter

PROMPT = [10, 11, 12, 13]


def rollout_config(**fields: Any) -> RolloutConfig:
    defaults = {"name": "hf", "dtype": "float32", "load_format": "auto", "tensor_model_parallel_size": 1}
    return RolloutConfig(**{**defaults, "prompt_length": 32, "response_length": 16, **fields})


def make_server(checkpoint: Path, replica_rank: int = 0, **config: Any) -> HFServer:
    return HFServer(rollout_config(**config), HFModelConfig(path=str(checkpoint)), replica_rank)


def send(
    server: HFServer, prompt: list[int] = PROMPT, image: Image.Image | None = None, name: str = "r", **params: Any
) -> Any:
    return server.generate(prompt, {"ignore_eos": True, **params}, name, image_data=image and [image])


def send_together(server: HFServer, *requests: dict[str, Any]) -> list[Any]:
    async def send_all() -> list[Any]:
        return await asyncio.gather(*(send(server, **params) for params in requests), return_exceptions=True)

    return asyncio.run(send_all())


def test_seeds_give_the_same_tokens_in_any_batch_and_others_in_later_turns(checkpoint: Path) -> None:
    """Seeds of the request, of its name with full determinism, and of its prompt with a count."""
    prompts = [[10 + index % 3, 11] for index in range(9)]

    async def responses(order: list[int], max_num_seqs: int, of: str, step: int = 1, rank: int = 0) -> list[Any]:
        server = make_server(checkpoint, rank, max_num_seqs=max_num_seqs, full_determinism=of == "name")
        await server.set_global_steps(step)
        params = [{"seed": 100 + i} if of == "seed" else {"name": f"det-{i}"} for i in order]
        outputs = await asyncio.gather(*(send(server, prompts[i], **params[at]) for at, i in enumerate(order)))
        drawn = zip(order, outputs, strict=True)
        return sorted((prompts[i], None if of == "prompt" else i, output.token_ids) for i, output in drawn)

    shuffled = random.Random(0).sample(range(9), 9)
    for of in ("seed", "name", "prompt"):
        first = asyncio.run(responses(list(range(9)), 256, of))
        assert asyncio.run(responses(shuffled, 4, of)) == first
        assert len({tuple(tokens) for *_, tokens in first}) == 9
    for other in ({"step": 2}, {"rank": 1}):
        assert asyncio.run(responses(list(range(9)), 256, of, **other)) != first
    # An agent loop sends the same seed for every turn of a session.
    server = make_server(checkpoint)
    first, later = (asyncio.run(send(server, prompt, seed=7)).token_ids for prompt in ([10, 11], [10, 11, 12]))
    # The model is nearly uniform, so equal random numbers would give nearly equal tokens.
    assert sum(a == b for a, b in zip(first, later, strict=True)) < len(first) // 2


def test_responses_fit_the_context_and_bad_requests_fail_alone(checkpoint: Path) -> None:
    requests = {}, {"max_tokens": 50}, {"max_new_tokens": 2}, {"prompt": list(range(10, 20))}
    *outputs, full = send_together(make_server(checkpoint, max_model_len=10), *requests)
    assert [len(output.token_ids) for output in outputs] == [6, 6, 2]
    assert "leaves no room in a context of 10" in str(full)
    requests = {}, {"prompt": PROMPT * 10}, {"prompt": []}, {"min_p": 0.5}
    good, long, empty, unknown = send_together(make_server(checkpoint), *requests)
    assert [len(output.token_ids) for output in (good, long)] == [16, 32 + 16 - 40]
    assert "prompts need a token" in str(empty)
    assert "min_p" in str(unknown)


def test_aborted_requests_resume_to_the_same_response(checkpoint: Path) -> None:
    """verl's partial rollout: resend prompt plus tokens so far once generation is open again."""

    async def scenario() -> None:
        server = make_server(checkpoint, response_length=400)
        await server.set_global_steps(7)
        whole = await send(server, temperature=0)
        forwards: list[None] = []
        server.model.register_forward_hook(lambda *_: forwards.append(None))
        request = asyncio.create_task(send(server, temperature=0))
        while len(forwards) < 2:  # the second follows the first token
            await asyncio.sleep(0.001)
        await server.abort_all_requests()
        partial = await request
        assert partial.extra_fields["global_steps"] == 7
        assert 0 < len(partial.log_probs) == len(partial.token_ids) < 400
        so_far = partial.token_ids
        parked = asyncio.create_task(send(server, PROMPT + so_far, temperature=0, max_tokens=400 - len(so_far)))
        await asyncio.sleep(0.1)
        assert not parked.done()
        await server.resume_generation()
        rest = await parked
        assert so_far + rest.token_ids == whole.token_ids
        assert (partial.stop_reason, rest.stop_reason) == ("aborted", "completed")
        await server.abort_all_requests(reject_request=True)
        rejected = await send(server)
        assert (rejected.stop_reason, rejected.token_ids) == ("aborted", [])

    asyncio.run(scenario())


def test_weights_arrive_in_buckets_and_unknown_ones_are_refused(checkpoint, monkeypatch, model) -> None:
    server = make_server(checkpoint, load_format="dummy")
    with pytest.raises(RuntimeError, match=r"lora_A.*lora\.merge=True"):
        asyncio.run(server.update_weights({"layers.0.lora_A": torch.zeros(1)}))
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight is \(1,\), the model has"):
        asyncio.run(server.update_weights({"model.norm.weight": torch.zeros(1)}))

    buckets: list[list[str]] = []

    async def remote(named_tensors: dict[str, torch.Tensor]) -> None:
        buckets.append(list(named_tensors))
        await server.update_weights(named_tensors)

    monkeypatch.setattr(ServerAdapter, "server", SimpleNamespace(update_weights=SimpleNamespace(remote=remote)))
    config = rollout_config(checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=1))
    adapter = ServerAdapter(config, HFModelConfig(path=str(checkpoint)), device_mesh=None, replica_rank=0)
    big = torch.zeros(1 << 18)
    server._weights = {name: big.clone() for name in "abc"} | {"d": torch.zeros(1)}
    asyncio.run(adapter.update_weights([*((name, big + 1) for name in "abc"), ("d", torch.ones(1))]))
    assert buckets == [["a"], ["b"], ["c"], ["d"]]
    assert all(weight.mean() == 1 for weight in server._weights.values())
    with pytest.raises(ValueError, match="backend=naive"):
        asyncio.run(adapter.update_weights([], wire_format="delta_flush"))
    with pytest.raises(NotImplementedError, match=r"lora\.merge=True"):
        asyncio.run(adapter.update_weights([], peft_config={"r": 8}))
    server = make_server(checkpoint, load_format="dummy")
    with pytest.raises(RuntimeError, match="before the trainer's first update_weights"):
        asyncio.run(send(server))
    for name, tensor in model.state_dict().items():
        asyncio.run(server.update_weights({name: tensor}))
    assert_log_probs(model, PROMPT, asyncio.run(send(server)))


def test_weights_of_single_experts_are_loaded(tmp_path: Path, tokenizer: Any) -> None:
    """transformers keeps a layer's experts in one tensor; verl sends the matrices of each expert."""
    save_tiny_model(tmp_path, "qwen3_moe", num_experts=8, moe_intermediate_size=16)
    tokenizer.save_pretrained(tmp_path)
    server = make_server(tmp_path, load_format="dummy")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sent = dict(unfuse_moe_params(trained.named_parameters(), "qwen3_moe"))
    assert any(".experts.7.up_proj" in name for name in sent)
    for name, tensor in sent.items():
        asyncio.run(server.update_weights({name: tensor.detach()}))
    for name, weight in trained.state_dict().items():
        assert torch.equal(server.model.state_dict()[name], weight), name


SEQUENCES = [[10, 11, 12, 13, 14], [10, 11, 40], list(range(20, 32))]


def test_prompt_logprobs_match_the_model_in_verls_order(checkpoint: Path, model: Any) -> None:
    sent = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    outputs = send_together(make_server(checkpoint), *({"prompt": sequence, **sent} for sequence in SEQUENCES))
    for sequence, output in zip(SEQUENCES, outputs, strict=True):
        log_probs = model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        ids = torch.tensor(output.extra_fields["prompt_ids"])
        log_probs_sent = torch.tensor(output.extra_fields["prompt_logprobs"])
        assert ids.shape == log_probs_sent.shape == (len(sequence), 1)
        assert ids[:-1, 0].tolist() == sequence[1:]
        torch.testing.assert_close(log_probs_sent[:-1], log_probs.gather(1, ids[:-1]))
        assert not log_probs_sent[-1].any()
        assert len(output.token_ids) == 1


def test_unsupported_inputs_and_settings_are_refused(checkpoint: Path) -> None:
    server = make_server(checkpoint)
    with pytest.raises(ValueError, match="does not support images for qwen3"):
        asyncio.run(server.generate(PROMPT, {}, "r", image_data=[object()], video_data=None))
    with pytest.raises(ValueError, match=r"takes images only.*video_data"):
        asyncio.run(server.generate(PROMPT, {}, "r", video_data=[object()]))
    with pytest.raises(ValueError, match="logprobs_mode=processed_logprobs"):
        make_server(checkpoint, logprobs_mode="raw_logprobs")
    with pytest.raises(ValueError, match="tensor_model_parallel_size=1"):
        HFReplica(0, rollout_config(tensor_model_parallel_size=2), None, gpus_per_node=2)
    with pytest.raises(ValueError, match="vllm or sglang for reward models"):
        HFReplica(0, rollout_config(), None, gpus_per_node=1, is_reward_model=True)


def test_log_probs_with_images_match_single_sequences(tmp_path: Path) -> None:
    """Prompts of different images, of equal ones and of none, in one batch."""
    vision_checkpoint = make_tiny_vision_checkpoint(tmp_path / "model", warm_up_steps=0)
    processor = hf_processor(str(vision_checkpoint))
    images, prompts = [*(draw_squares(count, random.Random(count)) for count in (2, 4, 2)), None], []
    for image in images:
        shown = "<|vision_start|><|image_pad|><|vision_end|>" if image else ""
        text = f"<|im_start|>user\n{shown}How many?<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(dict(processor(text=[text], images=image and [image], return_tensors="pt")))
    tokens = [prompt["input_ids"][0].tolist() for prompt in prompts]
    requests = ({"prompt": ids, "image": image, "seed": 3} for ids, image in zip(tokens, images, strict=True))
    outputs = send_together(make_server(vision_checkpoint, prompt_length=64, response_length=6), *requests)
    model = AutoModelForImageTextToText.from_pretrained(vision_checkpoint, dtype=torch.float32)
    placeholders = [model.config.image_token_id, model.config.video_token_id]
    for inputs, output in zip(prompts, outputs, strict=True):
        length, answer = inputs["input_ids"].shape[1], torch.tensor([output.token_ids])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, answer.shape[1]))
        inputs.pop("attention_mask")
        with torch.no_grad():
            logits = model(**inputs).logits[0, length - 1 : -1]
        assert not set(output.token_ids) & set(placeholders)
        logits[:, placeholders] = -torch.inf
        want = logits.log_softmax(-1).gather(-1, answer[0, :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), want, rtol=1e-5, atol=1e-5)
    assert outputs[0].log_probs == outputs[2].log_probs
    assert outputs[0].log_probs != outputs[1].log_probs


SELECTED = """
import sys, verl
from verl.utils.device import get_device_name, get_device_id, get_torch_device
from verl.utils.distributed import initialize_global_process_group_ray as init
sys.stdout.write(f'{get_device_name()} {get_device_id()} {get_torch_device().__name__} {init.__defaults__}')
"""
LEFT_ALONE = """
import os, sys
os.environ.pop("VERL_PLATFORM", None)
import verl
from verl.plugin.platform.platform_manager import PlatformRegistry, _detect_platform_name
from verl.utils.distributed import initialize_global_process_group_ray as init
registered = 'cpu' in PlatformRegistry.registered_names()
sys.stdout.write(f'{registered} {_detect_platform_name() == "cpu"} {init.__defaults__}')
"""


def test_platform_is_used_on_request_only() -> None:
    selected, left_alone = run_fresh([(SELECTED, {"VERL_PLATFORM": "cpu"}), (LEFT_ALONE, {})])
    assert selected.stdout.splitlines()[-1] == "cpu cpu verl_pg_plugin.cpu.device (None, 'cpu:gloo')", selected.stderr
    assert left_alone.stdout.splitlines()[-1] == "True False (None, None)", left_alone.stderr
