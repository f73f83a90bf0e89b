"""Write a tiny Qwen3-VL checkpoint and a data set of images whose coloured squares it counts, for training on a CPU.

    python scripts/make_image_task.py --data DIR --model DIR [--for-vllm]

Data are ``train.parquet`` and ``test.parquet`` in verl's RL format. The weights are random, then trained for some
seconds on such images (supervised, answer tokens only), so that the reward starts above zero. ``--for-vllm`` makes
heads of 64 for GPU kernels, and a processor with videos, which vLLM requires and which needs torchvision.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from benchmarks.shapes import qwen3_vl, text_sizes
from data.whole_directory import whole_directory
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, Qwen2VLImageProcessorPil

from verl_pg_plugin.cpu.images import Qwen3VLProcessor
from verl_pg_plugin.demo import END, character_tokenizer

CELLS, CELL = 3, 8
"""Cells on a side of the image, and pixels on a side of a cell, which is one token of the vision encoder."""
COUNTS = (1, 2, 3, 4)
COLOURS = ((220, 40, 40), (40, 160, 60), (50, 70, 220))
# verl 0.9.1 fails on M-RoPE positions if all sequences of a batch have one length, so lengths differ.
QUESTIONS = ("How many?", "How many squares?", "Count the squares.", "What is the number of squares?")
SYSTEM_PROMPT = "You look at an image. Reply with the number of coloured squares in it and nothing else."
MERGE, PATCH, FRAMES = 2, CELL // 2, 2
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def draw_squares(count: int, rng: random.Random) -> Image.Image:
    """Return an image with ``count`` coloured cells at random positions."""
    pixels = np.full((CELLS * CELL, CELLS * CELL, 3), 255, dtype=np.uint8)
    for place in rng.sample(range(CELLS**2), count):
        top, left = CELL * (place // CELLS), CELL * (place % CELLS)
        pixels[top : top + CELL, left : left + CELL] = rng.choice(COLOURS)
    return Image.fromarray(pixels)


def chat(question: str) -> list[dict[str, Any]]:
    """Return the prompt's messages, with verl's mark at the image's position."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"<image>{question}"}]


def rl_row(index: int, split: str, rng: random.Random) -> dict[str, Any]:
    """Return one row of verl's RL data set."""
    count, encoded = rng.choice(COUNTS), io.BytesIO()
    draw_squares(count, rng).save(encoded, "PNG")
    return {
        "data_source": "squares",
        "prompt": chat(rng.choice(QUESTIONS)),
        "images": [{"bytes": encoded.getvalue()}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": str(count)},
        "extra_info": {"split": split, "index": index},
    }


def make_image_data(output_dir: Path) -> Path:
    """Write both files to ``output_dir`` and return it; SystemExit if it is not empty."""
    rng = random.Random(0)
    with whole_directory(output_dir) as scratch:
        for split, size in (("train", 256), ("test", 32)):
            dataset = datasets.Dataset.from_list([rl_row(index, split, rng) for index in range(size)])
            dataset.to_parquet(str(scratch / f"{split}.parquet"))
    return output_dir


def tiny_processor(for_vllm: bool = False) -> transformers.Qwen3VLProcessor:
    """Return a processor with a token for each character and mark, and patches of 4 pixels."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [VISION_START, VISION_END, IMAGE, VIDEO]})
    side = CELLS * CELL
    patches = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": FRAMES}
    images = Qwen2VLImageProcessorPil(**patches, size={"shortest_edge": side**2, "longest_edge": side**2})
    tokenizer.chat_template = CHAT_TEMPLATE
    if for_vllm:
        videos = transformers.Qwen3VLVideoProcessor(**patches)
        return transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)
    return Qwen3VLProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)


def tiny_vision_model(tokenizer: Any, for_vllm: bool = False) -> PreTrainedModel:
    """Return a random float32 model: 2 layers of width 96, an encoder of 2 blocks of width 48 (128 for vLLM)."""
    head_dim, width, sections = (64, 128, [12, 10, 10]) if for_vllm else (24, 48, [4, 4, 4])
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = qwen3_vl(
        text_sizes(len(tokenizer), 96, 192, 2, 4, 2, head_dim, max_position_embeddings=1024, **ends),
        sections,
        1e4,
        tokenizer.convert_tokens_to_ids([VISION_START, VISION_END, IMAGE, VIDEO]),
        (2, width, 2 * width, 2, PATCH, 96),
        spatial_merge_size=MERGE,
        temporal_patch_size=FRAMES,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    )
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config, dtype="float32"))


def warm_up(model: Any, processor: transformers.Qwen3VLProcessor, steps: int, rng: random.Random) -> None:
    """Train on answers to random images in place: ``steps`` AdamW steps on 32 samples each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    prompts = [_prompt(processor, question) for question in QUESTIONS]
    for _ in range(steps):
        counts, prompt = rng.choices(COUNTS, k=32), rng.choice(prompts)
        batch = processor(
            text=[prompt + str(count) + END for count in counts],
            images=[[draw_squares(count, rng)] for count in counts],
            return_tensors="pt",
        )
        labels = batch["input_ids"].clone()
        labels[:, :-2] = -100
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _prompt(processor: transformers.Qwen3VLProcessor, question: str) -> str:
    system, user = chat(question)
    user["content"] = [{"type": "image"}, {"type": "text", "text": question}]
    return processor.apply_chat_template([system, user], add_generation_prompt=True, tokenize=False)


def make_tiny_vision_checkpoint(output_dir: Path, *, warm_up_steps: int = 60, for_vllm: bool = False) -> Path:
    """Write model, tokenizer and processor to ``output_dir`` and return it; SystemExit if it is not empty."""
    torch.manual_seed(0)
    processor = tiny_processor(for_vllm)
    model = tiny_vision_model(processor.tokenizer, for_vllm)
    warm_up(model, processor, warm_up_steps, random.Random(0))
    with whole_directory(output_dir) as scratch:
        model.save_pretrained(scratch)
        processor.save_pretrained(scratch)
        if not for_vllm:
            for file in (scratch / "processor_config.json", scratch / "tokenizer_config.json"):
                # transformers would resolve a class name to its own class; see ``verl_pg_plugin.cpu.images``.
                settings = json.loads(file.read_text())
                settings.pop("processor_class", None)
                file.write_text(json.dumps(settings, indent=2))
    return output_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--model", type=Path, metavar="DIR")
    parser.add_argument("--for-vllm", action="store_true", help="for training on a GPU")
    args = parser.parse_args()
    if args.data:
        sys.stdout.write(f"{make_image_data(args.data)}\n")
    if args.model:
        sys.stdout.write(f"{make_tiny_vision_checkpoint(args.model, for_vllm=args.for_vllm)}\n")


if __name__ == "__main__":
    main()
