"""Lengths beside a dump are read as they were written."""

import json
from pathlib import Path

import numpy as np

from verl_pg_plugin.batching.session_order import BatchRows
from verl_pg_plugin.reporting.rollout_lengths import are_lengths, read_lengths, write_lengths

ROWS = BatchRows(
    uids=["b", "a", "b"],
    sessions=np.array([0, 0, 1]),
    places=np.array([2, 0, 0]),
    prompt_lengths=np.array([30, 9, 12]),
    response_lengths=np.array([4, 5, 0]),
    common_tokens=6,
)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    file = write_lengths(tmp_path / "made" / "here", 12, ROWS)
    assert file == tmp_path / "made" / "here" / "lengths" / "12.jsonl", "beside verl's files, and none of them"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(map(are_lengths, records))
    again = read_lengths(records)
    assert (list(again.uids), again.common_tokens) == (["b", "a", "b"], 6)
    for name in ("sessions", "places", "prompt_lengths", "response_lengths"):
        np.testing.assert_array_equal(getattr(again, name), getattr(ROWS, name))


def test_a_step_that_is_run_again_replaces_its_file(tmp_path: Path) -> None:
    """As verl's dump does when a run resumes from an earlier checkpoint."""
    write_lengths(tmp_path, 12, ROWS)
    assert len(write_lengths(tmp_path, 12, ROWS.select([1])).read_text().splitlines()) == 1


def test_a_line_of_verls_dump_is_none_of_these() -> None:
    assert not are_lengths({"input": "a", "output": "b", "uid": "x_0_0", "step": 3, "score": 1.0})
