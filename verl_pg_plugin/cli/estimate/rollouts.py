"""Lengths of a run's rollouts: exact ones that our trainers have written, or the text that verl has dumped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from verl_pg_plugin.cli.command import CommandError
from verl_pg_plugin.cost.forecast import Batch
from verl_pg_plugin.layout.order import IntArray

__all__ = ["read_batch", "token_ids"]


def read_batch(folder: Path, num_groups: int, load_tokenizer: Callable[[], Any]) -> tuple[Batch, str]:
    """The first groups of the last step, and how exact their lengths are.

    Args:
        folder: that ``trainer.rollout_data_dir`` named, or the one with lengths in it.
        num_groups: to take.
        load_tokenizer: of the model, for text.

    Raises:
        CommandError: there is nothing of this kind, or a file is not what it should be.
    """
    files = list(folder.glob("*.jsonl"))
    if not files:
        raise CommandError(f"--rollouts {folder} has no .jsonl file; train with trainer.rollout_data_dir=<folder>")
    file = max(files, key=lambda file: (len(file.stem), file.stem))
    return _of_text(_records(file), num_groups, file, load_tokenizer)


def _records(file: Path) -> list[dict[str, Any]]:
    records = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # and not where Unicode knows of other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise CommandError(f"{file}, line {number} is no JSON: {error}; is the run still writing it?") from error
        if not isinstance(record, dict):
            raise CommandError(f"{file}, line {number} is no JSON object")
        records.append(record)
    if not records:
        raise CommandError(f"{file} is empty; is the run still writing it?")
    return records


def _of_text(
    records: list[dict[str, Any]], num_groups: int, file: Path, load_tokenizer: Callable[[], Any]
) -> tuple[Batch, str]:
    """Lines with ``input`` and ``output``, and ``uid``, which sequences of a prompt share but for ``_session_output``;
    V0's dump has none.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, record in enumerate(records, start=1):
        if not {"input", "output"} <= record.keys():
            raise CommandError(f"{file}, line {number}: no input and output; it is no rollout dump of verl's")
        key = str(record["uid"]).rsplit("_", 2)[0] if "uid" in record else record["input"]
        groups.setdefault(key, []).append(record)
    chosen = list(groups.values())[:num_groups]
    tokenizer = load_tokenizer()
    prompts = [token_ids(tokenizer, group[0]["input"]) for group in chosen]
    responses = [[max(len(token_ids(tokenizer, record["output"])), 1) for record in group] for group in chosen]
    return Batch.of_prompts(prompts, responses), (
        f"{len(chosen)} of {len(groups)} groups of {file.name}; the dump is text without special tokens, so lengths are"
        " a few tokens short (chat template, end of a turn), and ratios off by that share"
    )


def token_ids(tokenizer: Any, text: str) -> IntArray:
    """Of a text as it stands, (tokens,)."""
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
