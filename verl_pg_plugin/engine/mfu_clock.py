"""Model FLOPs utilisation of one pass over a mini-batch, from the time that its work takes on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.flops_counter import get_device_flops


class MfuClock:
    """Runs from when it is made to the end of the work that the host has launched by ``stop``.

    Nothing waits for the device before ``metrics``, so that the host prepares the optimizer's step, for which it takes
    some 10 ms at the size of Qwen3-4B, while the last backward still runs.
    """

    def __init__(self) -> None:
        self._begin, self._flops = _now(), 0.0
        self._end: Any = None

    def stop(self, flops: float) -> None:
        """Every device computes ``flops`` in the pass, on average."""
        self._end, self._flops = _now(), flops

    def metrics(self) -> dict[str, list[float]]:
        """MFU by this rank's clock, for which this waits; 0 where verl does not know the device's peak."""
        if isinstance(self._begin, float):
            seconds = self._end - self._begin
        else:
            self._end.synchronize()
            seconds = self._begin.elapsed_time(self._end) / 1e3
        return {"prefix_grouper/mfu_physical": [self._flops / (get_device_flops("T") * 1e12 * seconds)]}


class MfuOfPasses:
    """Put in front of one of verl's engines, whose passes then report their MFU when they are over.

    Attributes:
        clock: of the last mini-batch, stopped; None before the first and where nothing is timed.
    """

    clock: MfuClock | None = None

    def train_batch(self, data: TensorDict, loss_function: Callable) -> dict[str, Any]:
        return self._timed(super().train_batch(data, loss_function))  # type: ignore[misc]

    def infer_batch(self, data: TensorDict, loss_function: Callable | None = None) -> dict[str, Any]:
        return self._timed(super().infer_batch(data, loss_function))  # type: ignore[misc]

    def _timed(self, output: dict[str, Any]) -> dict[str, Any]:
        if self.clock is not None:
            output["metrics"].update(self.clock.metrics())
        return output


def _now() -> Any:
    if get_device_name() == "cpu":
        return time.perf_counter()
    event = get_torch_device().Event(enable_timing=True)
    event.record()
    return event
