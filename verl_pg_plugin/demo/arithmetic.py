"""Sums of two small numbers as a data set in verl's RL format, and the reward of an answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Without digits: examples here would be noise that a tiny model has to learn to overlook.
SYSTEM_PROMPT = "You add two numbers. Reply with the sum in digits and nothing else: no words, no spaces, no signs."
PROBLEMS = [(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(5)]
"""Every question with its answer."""


def chat(question: str, length: int = 0) -> list[dict[str, str]]:
    """A question's messages; a system message of ``length`` characters begins with the question, so prompts differ."""
    system = f"{question} {SYSTEM_PROMPT} ".ljust(length, ".")[:length] if length else SYSTEM_PROMPT
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def write_data(folder: Path, *, test_size: int = 5, repeat: int = 32, length: int = 0) -> None:
    """Write ``train.parquet`` and ``test.parquet``; ``repeat`` is how often the first lists each of its questions."""
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
    """Score a response in [0, 1], for verl's ``reward.custom_reward_function``; of several turns the last one counts.

    0.2 x share of characters that are digits, 0.3 x share of places (of the longer string) where response and answer
    agree, 0.5 for the exact answer: a tiny model has something to climb before its first right answer.
    """
    response = solution_str.rpartition("assistant\n")[2]  # which stands in front of each turn
    if not response:
        return 0.0
    digits = sum(character in "0123456789" for character in response) / len(response)
    agreeing = sum(a == b for a, b in zip(response, ground_truth, strict=False))
    places = agreeing / max(len(response), len(ground_truth))
    return 0.2 * digits + 0.3 * places + 0.5 * (response == ground_truth)
