"""Exact lengths of a step's rollouts, in files beside the text that verl dumps of them.

``trainer.rollout_data_dir=DIR`` lets verl write ``DIR/STEP.jsonl``: text without special tokens, from which lengths
cannot be told exactly. Trainers that keep groups write ``DIR/lengths/STEP.jsonl`` too, a line for each row::

    {"step": 7, "uid": "...", "session": 0, "turn": 0, "prompt_len": 812, "response_len": 230, "common_prompt_len": 31}

``uid_session_turn`` is the row's ``uid`` in verl's dump of a V1 trainer; V0 has one row to a session. All prompts of
the step begin with the same ``common_prompt_len`` tokens. Rows come in the order in which ranks compute them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from verl_pg_plugin.batching.session_order import BatchRows

__all__ = ["FOLDER", "are_lengths", "read_lengths", "write_lengths"]

FOLDER = "lengths"
"""In the folder of verl's dumps, whose readers take every .jsonl there for text."""

NUMBERS = ("session", "turn", "prompt_len", "response_len", "common_prompt_len")


def write_lengths(rollout_data_dir: Path, step: int, rows: BatchRows) -> Path:
    """Write one step's file; returns its path.

    Raises:
        OSError: the folder cannot be written.
    """
    columns = zip(
        rows.uids,
        rows.sessions.tolist(),
        rows.places.tolist(),
        rows.prompt_lengths.tolist(),
        rows.response_lengths.tolist(),
        strict=True,
    )
    lines = [
        {
            "step": step,
            "uid": uid,
            "session": session,
            "turn": turn,
            "prompt_len": prompt,
            "response_len": response,
            "common_prompt_len": rows.common_tokens,
        }
        for uid, session, turn, prompt, response in columns
    ]
    path = rollout_data_dir / FOLDER / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def are_lengths(record: dict[str, Any]) -> bool:
    """Whether a line of a file is one of these, and not one of verl's."""
    return {"uid", *NUMBERS} <= record.keys()


def read_lengths(records: list[dict[str, Any]]) -> BatchRows:
    """The rows of a file, in its order.

    Args:
        records: its lines, at least one.

    Raises:
        ValueError: names the first line whose numbers are no lengths.
    """
    for number, record in enumerate(records, start=1):
        if not _is_row(record):
            raise ValueError(f"line {number} holds no lengths of a row: {json.dumps(record)[:200]}")
    columns = {name: np.array([record[name] for record in records], dtype=np.int64) for name in NUMBERS}
    return BatchRows(
        uids=[record["uid"] for record in records],
        sessions=columns["session"],
        places=columns["turn"],
        prompt_lengths=columns["prompt_len"],
        response_lengths=columns["response_len"],
        common_tokens=int(columns["common_prompt_len"][0]),
    )


def _is_row(record: dict[str, Any]) -> bool:
    """Whether a line with all entries could have been written."""
    if not isinstance(record["uid"], str) or any(type(record[name]) is not int for name in NUMBERS):
        return False
    prompt, common = record["prompt_len"], record["common_prompt_len"]
    return min(record["session"], record["turn"], record["response_len"], common) >= 0 and prompt >= max(common, 1)
