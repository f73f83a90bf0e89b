"""Write the arithmetic data set of the example: ``train.parquet`` and ``test.parquet`` in verl's RL format.

    python scripts/make_arithmetic_data.py --output-dir DIR [--max-number 4] [--test-size 5] [--repeat 32] [--seed 0]

Every question is a sum of two numbers behind one preamble, so that a prompt is much longer than its answer and
a GRPO group shares nearly all of its tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

import datasets
from data.whole_directory import whole_directory

DATA_SOURCE = "arithmetic"
MAX_NUMBER = 4
# Without digits: examples here would be noise that a tiny model has to learn to overlook.
SYSTEM_PROMPT = "You add two numbers. Reply with the sum in digits and nothing else: no words, no spaces, no signs."


def chat(question: str) -> list[dict[str, str]]:
    """The prompt's messages for a question such as ``3+4=``."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def problems(max_number: int) -> list[tuple[str, str]]:
    """Every ``(question, answer)`` with both numbers in ``0..max_number``."""
    numbers = range(max_number + 1)
    return [(f"{a}+{b}=", str(a + b)) for a, b in product(numbers, numbers)]


def rl_row(index: int, split: str, question: str, answer: str) -> dict[str, Any]:
    """One row of verl's RL data set."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": chat(question),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "question": question},
    }


def make_arithmetic_data(
    output_dir: Path, *, max_number: int = MAX_NUMBER, test_size: int = 5, repeat: int = 32, seed: int = 0
) -> tuple[Path, Path]:
    """Write both files and return their paths; ``repeat`` is how often the train file lists each question.

    Raises:
        ValueError: ``test_size`` leaves no question to train on.
        FileExistsError: ``output_dir`` is not empty.
    """
    everything = problems(max_number)
    if not 0 < test_size < len(everything):
        raise ValueError(f"--test-size must lie between 1 and {len(everything) - 1}, not {test_size}")
    random.Random(seed).shuffle(everything)
    splits = {"train": everything[test_size:] * repeat, "test": everything[:test_size]}
    with whole_directory(output_dir) as scratch:
        for split, rows in splits.items():
            dataset = datasets.Dataset.from_list([rl_row(index, split, *problem) for index, problem in enumerate(rows)])
            dataset.to_parquet(str(scratch / f"{split}.parquet"))
    return output_dir / "train.parquet", output_dir / "test.parquet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--max-number", type=int, default=MAX_NUMBER)
    parser.add_argument("--test-size", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    try:
        train, test = make_arithmetic_data(args.pop("output_dir"), **args)
    except (ValueError, FileExistsError) as error:
        parser.exit(1, f"error: {error}\n")
    sys.stdout.write(f"{train}\n{test}\n")


if __name__ == "__main__":
    main()
