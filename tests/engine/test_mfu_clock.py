"""MFU is told of every pass by the time that it took, and no pass waits for the device to tell it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import actor_loss, clone, group, make_engine, save_tiny_model
from verl_pg_plugin.engine import mfu_clock
from verl_pg_plugin.engine.mfu_clock import MfuClock
from verl_pg_plugin.synthetic import make_batch

MFU = "prefix_grouper/mfu_physical"


class Event:
    """A device's, at a time of its own, and what was asked of it."""

    milliseconds = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.asked: list[str] = []

    def record(self) -> None:
        self.at, Event.milliseconds = Event.milliseconds, Event.milliseconds + 250.0

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    def elapsed_time(self, other: "Event") -> float:
        assert other.asked == ["synchronize"], "only a time that has come can be told"
        return other.at - self.at


def test_a_devices_own_clock_is_read_when_the_pass_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mfu_clock, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(mfu_clock, "get_torch_device", lambda: type("Device", (), {"Event": Event}))
    monkeypatch.setattr(mfu_clock, "get_device_flops", lambda unit: 1e-9)  # in units of 1e12: 1,000 FLOP/s
    clock = MfuClock()
    clock.stop(flops=100.0)
    assert not clock._end.asked
    assert clock.metrics() == {MFU: [pytest.approx(100 / (1000 * 0.25))]}


@pytest.mark.usefixtures("process_group")
def test_every_pass_tells_its_own_and_stock_passes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mfu_clock, "get_device_flops", lambda unit: 1e-3)
    model = save_tiny_model(tmp_path)
    batch = make_batch(group(9, [5, 4], 1))

    def told(engine: Any) -> list[Any]:
        with engine.train_mode():
            update = engine.train_batch(clone(batch), actor_loss())["metrics"]
        with engine.eval_mode():
            log_probs = engine.infer_batch(clone(batch))["metrics"]
        return [update.get(MFU), log_probs.get(MFU)]

    (of_update,), (of_log_probs,) = told(make_engine(model, packed=True))
    assert 0 < of_update < 1
    assert 0 < of_log_probs < 1
    assert of_update != of_log_probs
    assert told(make_engine(model, packed=False)) == [None, None]
