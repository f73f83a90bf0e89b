"""Lengths of a run's rollouts: exact ones that our trainers have written, or the text that verl has dumped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from verl_pg_plugin.cli.command import CommandError
from verl_pg_plugin.cost.forecast import Batch
from verl_pg_plugin.layout.order import IntArray
from verl_pg_plugin.reporting.rollout_lengths import FOLDER, are_lengths, read_lengths

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
    files = [*folder.glob("*.jsonl"), *(folder / FOLDER).glob("*.jsonl")]
    if not files:
        raise CommandError(f"--rollouts {folder} has no .jsonl file; train with trainer.rollout_data_dir=<folder>")
    file = max(files, key=lambda file: (len(file.stem), file.stem, file.parent.name == FOLDER))
    records = _records(file)
    if all(map(are_lengths, records)):
        text = folder / file.name
        if file.parent == folder or not text.is_file() or not _of_another_run(records, dumped := _records(text)):
            return _of_lengths(records, num_groups, file)
        records, file = dumped, text
    return _of_text(records, num_groups, file, load_tokenizer)


def _of_another_run(lengths: list[dict[str, Any]], text: list[dict[str, Any]]) -> bool:
    """Whether a run that writes no lengths has dumped the step into the same folder; V0's dump does not tell."""
    written = {f"{line.get('uid')}_{line.get('session')}_{line.get('turn')}" for line in lengths}
    return all("uid" in line and str(line["uid"]) not in written for line in text)


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


def _of_lengths(records: list[dict[str, Any]], num_groups: int, file: Path) -> tuple[Batch, str]:
    try:
        rows = read_lengths(records)
    except ValueError as error:
        raise CommandError(f"{file}, {error}") from error
    rows = replace(rows, response_lengths=np.maximum(rows.response_lengths, 1))  # as of text
    chosen = rows.select(np.flatnonzero(rows.groups < num_groups))
    batch = Batch.of_order(chosen.order(), chosen.prompt_lengths)
    return batch, (
        f"{min(num_groups, rows.groups.max() + 1)} of {rows.groups.max() + 1} groups of {file.parent.name}/{file.name}:"
        " exact lengths, written by the trainer; responses that begin alike share more than is known here"
    )


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
