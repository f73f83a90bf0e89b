"""What a mini-batch reports about itself is what its rows cost."""

from types import SimpleNamespace

import numpy as np
import pytest

from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.engine.batch import plan_metrics as module
from verl_pg_plugin.layout import build_packed_layout
from verl_pg_plugin.mixers.protocol import PairCost

FLOPS = ModelFlops(per_row=100.0, per_head_row=10.0, pairs=(PairCost(1.0),))
LAYOUT = build_packed_layout(np.array([1, 2, 3, 4, 1, 2, 3, 5]), np.array([0, 4, 8]), np.array([3, 3]))


def metrics(forward_only: bool, monkeypatch: pytest.MonkeyPatch, num_padding_rows: int = 0) -> dict[str, list[float]]:
    monkeypatch.setattr(module, "get_device_flops", lambda unit: 1e-9)  # in units of 1e12: 1,000 FLOP/s
    plan = SimpleNamespace(layouts=[LAYOUT, LAYOUT], num_rmpad=0, chains=[], carried_rows=0, exported_rows=0)
    figures = module.figures_of_rank(plan, num_padding_rows, 0, FLOPS, seconds=2.0, forward_only=forward_only)
    return module.plan_metrics([figures, figures], sp_size=2)


def test_an_update_counts_its_forward_three_times_and_log_probs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = 2 * (4 * 100 + 2 * 10 + (1 + 2 + 3 + 3))
    assert metrics(True, monkeypatch)["prefix_grouper/mfu_physical"] == [pytest.approx(forward / (1000 * 2 * 2.0))]
    update = metrics(False, monkeypatch)["prefix_grouper/mfu_physical"]
    assert update == [pytest.approx(3 * forward / (1000 * 2 * 2.0))]


def test_padding_is_physical_and_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, padded = metrics(True, monkeypatch), metrics(True, monkeypatch, num_padding_rows=8)
    assert plain["prefix_grouper/dedup_ratio"] == [16 / 8]
    assert padded["prefix_grouper/dedup_ratio"] == [16 / 16]
    assert padded["prefix_grouper/padding_tokens"] == [8.0]
    assert padded["prefix_grouper/mfu_physical"] == plain["prefix_grouper/mfu_physical"]
