"""Write the image data set of the example: ``train.parquet`` and ``test.parquet`` in verl's RL format.

    python scripts/make_image_data.py --output-dir DIR [--train-size 256] [--test-size 32] [--seed 0]

Every image shows some coloured squares on a white ground, and the question is how many: nothing in the text tells.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from data.whole_directory import whole_directory
from PIL import Image

DATA_SOURCE = "squares"
CELLS, CELL = 3, 8
"""Cells on a side, and pixels on a side of each: what one token of the tiny model's vision encoder sees."""
COUNTS = (1, 2, 3, 4)
COLOURS = ((220, 40, 40), (40, 160, 60), (50, 70, 220))
# Of several lengths: verl 0.9.1 fails on positions in three dimensions where all sequences of a batch have one length.
QUESTIONS = ("How many?", "How many squares?", "Count the squares.", "What is the number of squares?")
SYSTEM_PROMPT = "You look at an image. Reply with the number of coloured squares in it and nothing else."


def draw_squares(count: int, rng: random.Random) -> Image.Image:
    """An image with ``count`` coloured cells at random places."""
    pixels = np.full((CELLS * CELL, CELLS * CELL, 3), 255, dtype=np.uint8)
    for place in rng.sample(range(CELLS**2), count):
        top, left = CELL * (place // CELLS), CELL * (place % CELLS)
        pixels[top : top + CELL, left : left + CELL] = rng.choice(COLOURS)
    return Image.fromarray(pixels)


def chat(question: str) -> list[dict[str, Any]]:
    """The prompt's messages, with the mark of verl's data set where the image belongs."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"<image>{question}"}]


def rl_row(index: int, split: str, rng: random.Random) -> dict[str, Any]:
    """One row of verl's RL data set."""
    count, encoded = rng.choice(COUNTS), io.BytesIO()
    draw_squares(count, rng).save(encoded, "PNG")
    return {
        "data_source": DATA_SOURCE,
        "prompt": chat(rng.choice(QUESTIONS)),
        "images": [{"bytes": encoded.getvalue()}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": str(count)},
        "extra_info": {"split": split, "index": index},
    }


def make_image_data(
    output_dir: Path, *, train_size: int = 256, test_size: int = 32, seed: int = 0
) -> tuple[Path, Path]:
    """Write both files and return their paths.

    Raises:
        FileExistsError: ``output_dir`` is not empty.
    """
    rng = random.Random(seed)
    with whole_directory(output_dir) as scratch:
        for split, size in (("train", train_size), ("test", test_size)):
            dataset = datasets.Dataset.from_list([rl_row(index, split, rng) for index in range(size)])
            dataset.to_parquet(str(scratch / f"{split}.parquet"))
    return output_dir / "train.parquet", output_dir / "test.parquet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--train-size", type=int, default=256)
    parser.add_argument("--test-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    try:
        train, test = make_image_data(args.pop("output_dir"), **args)
    except FileExistsError as error:
        parser.exit(1, f"error: {error}\n")
    sys.stdout.write(f"{train}\n{test}\n")


if __name__ == "__main__":
    main()
