"""The attention benchmark runs where there is no GPU, and compares what it times with float32."""

import csv
import sys
from pathlib import Path

import pytest
from bench_attention import main


def test_it_times_alone_and_packed_and_compares_both_with_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--device", "cpu", "--dtype", "float32"]
    cases, table = ["--cases", "48,16,4,2", "16,8,1", "tree:9,3,2,3"], tmp_path / "attention.csv"
    paths = ["--paths", "packed:sdpa", "alone:sdpa", "--rounds", "1", "--csv", str(table)]
    monkeypatch.setattr(sys, "argv", ["bench_attention.py", *shape, *cases, *paths])
    monkeypatch.setenv("BENCH_COMMIT", "abc1234")
    assert main() == 0
    with table.open() as file:
        rows = {(row["case"], row["path"]): row for row in csv.DictReader(file)}
    assert len(rows) == 6
    assert all(float(row["error"]) < 1e-5 for row in rows.values())
    packed = rows["48,16,4,2", "packed:sdpa"]
    shared = 47 * 48 // 2 + 4 * (16 * 47 + 16 * 17 // 2)
    assert float(packed["bound"]) == pytest.approx(4 * (63 * 64 // 2) / shared)
    assert float(packed["both_min_ms"]) <= float(packed["both_ms"]) <= float(packed["both_max_ms"])
    assert packed["commit"] == "abc1234"
    assert float(rows["16,8,1", "packed:sdpa"]["bound"]) == 1.0
