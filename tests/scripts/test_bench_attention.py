"""The attention benchmark runs where there is no GPU, on the paths that can, and says why the others cannot."""

import csv
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_times_what_runs_here_compares_it_with_float32_and_lists_what_was_skipped(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/bench_attention.py", "--device", "cpu", "--dtype", "float32"]
    command += ["--cases", "48,16,4,2", "16,8,1", "turns:5,6,3", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    command += ["--repeats", "3", "--csv", tmp_path / "attention.csv"]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    env = os.environ | {"BENCH_COMMIT": "abc1234", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu"}
    subprocess.run(command, check=True, capture_output=True, env=env, cwd=tmp_path)
    with (tmp_path / "attention.csv").open() as file:
        rows = {(row["case"], row["path"]): row for row in csv.DictReader(file)}
    assert {case for case, _ in rows} == {"48,16,4,2", "16,8,1,1", "turns:5,6,3"}
    packed = rows["48,16,4,2", "packed:sdpa"]
    alone = 4 * (63 * 64 // 2)
    shared = 47 * 48 // 2 + 4 * (16 * 47 + 16 * 17 // 2)
    assert abs(float(packed["bound"]) - alone / shared) < 1e-9
    assert max(float(packed[f"error_{name}"]) for name in ("out", "dq", "dk", "dv")) < 1e-5
    assert float(packed["both_min_ms"]) <= float(packed["both_ms"]) <= float(packed["both_max_ms"])
    assert packed["commit"] == "abc1234"
    assert "needs a cuda device" in rows["48,16,4,2", "packed:flash_attn_2"]["skipped"]
    assert float(rows["16,8,1,1", "packed:sdpa"]["bound"]) == 1.0
    turns = rows["turns:5,6,3", "packed:sdpa"]
    assert max(float(turns[f"error_{name}"]) for name in ("out", "dq", "dk", "dv")) < 1e-5
    assert [float(row["copied_keys_per_row"]) for row in (packed, turns)] == [(47 + 4 * 63) / (47 + 4 * 16), 0.0]
