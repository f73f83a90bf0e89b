"""The rollout shows its model the images of a prompt, and verl's data path makes what it is shown."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from verl.utils import hf_processor

from verl_pg_plugin.cpu.rollout import HFServer

from .test_server import make_server

TEXT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>How many?<|im_end|>\n<|im_start|>assistant\n"


def squares(count: int, seed: int) -> Image.Image:
    from make_image_task import draw_squares

    return draw_squares(count, random.Random(seed))


def encode(processor: Any, image: Image.Image | None) -> dict[str, torch.Tensor]:
    text = TEXT if image is not None else TEXT.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    return dict(processor(text=[text], images=image and [image], return_tensors="pt"))


def ask(server: HFServer, processor: Any, images: list[Image.Image | None]) -> list[Any]:
    async def scenario() -> list[Any]:
        prompts = [encode(processor, image)["input_ids"][0].tolist() for image in images]
        params = {"seed": 3, "ignore_eos": True}
        asked = (
            server.generate(prompt, params, "r", image_data=image and [image], video_data=None)
            for prompt, image in zip(prompts, images, strict=True)
        )
        return await asyncio.gather(*asked)

    return asyncio.run(scenario())


def test_log_probs_are_those_of_the_whole_sequence_with_its_image(tmp_path: Path) -> None:
    """Prompts of different images, of equal ones and of none, in one batch."""
    from make_image_task import make_tiny_vision_checkpoint

    vision_checkpoint = make_tiny_vision_checkpoint(tmp_path / "model", warm_up_steps=0)
    processor = hf_processor(str(vision_checkpoint))
    server = make_server(vision_checkpoint, prompt_length=64, response_length=6)
    images = [squares(2, 1), squares(4, 2), squares(2, 1), None]
    model = AutoModelForImageTextToText.from_pretrained(vision_checkpoint, dtype=torch.float32)
    outputs = ask(server, processor, images)
    for image, output in zip(images, outputs, strict=True):
        inputs = encode(processor, image)
        length = inputs["input_ids"].shape[1]
        answer = torch.tensor([output.token_ids])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, answer.shape[1]))
        inputs.pop("attention_mask")
        with torch.no_grad():
            logits = model(**inputs).logits[0, length - 1 : -1]
        placeholders = [model.config.image_token_id, model.config.video_token_id]
        assert not set(output.token_ids) & set(placeholders)
        logits[:, placeholders] = -torch.inf
        want = logits.log_softmax(-1).gather(-1, answer[0, :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), want, rtol=1e-5, atol=1e-5)
    assert outputs[0].log_probs == outputs[2].log_probs
    assert outputs[0].log_probs != outputs[1].log_probs
