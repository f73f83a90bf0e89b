"""One short line on the console for each training step, in place of one with every metric."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from verl_pg_plugin.reporting.gain import DEDUP_RATIO, Gain

__all__ = ["StepTable"]

HEADER_EVERY = 20
BAR_WIDTH = 10
REWARD = "critic/score/mean"


@dataclass(frozen=True)
class Column:
    """A column; ``show`` writes the value of a metric that is there."""

    title: str
    metric: str
    show: Callable[[float], str]


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


COLUMNS = (
    Column("reward", REWARD, "{:.3f}".format),
    Column("prompt", "prompt_length/mean", "{:.0f}".format),
    Column("response", "response_length/mean", "{:.0f}".format),
    Column("dedup", DEDUP_RATIO, "{:.2f}x".format),
    Column("saved", DEDUP_RATIO, lambda ratio: f"{1 - 1 / ratio:.0%}"),
    Column("gen s", "timing_s/gen", _seconds),
    Column("old s", "timing_s/old_log_prob", _seconds),
    Column("ref s", "timing_s/ref", _seconds),
    Column("values s", "timing_s/values", _seconds),
    Column("critic s", "timing_s/update_critic", _seconds),
    Column("update s", "timing_s/update_actor", _seconds),
    Column("step s", "timing_s/step", _seconds),
)


@dataclass
class StepTable:
    """Stands in for verl's console logger, with its two methods.

    Args:
        total_steps: of the run; None where it is unknown.
        stream: where lines go.
        clock: seconds, for the time that is left.
    """

    total_steps: int | None = None
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    clock: Callable[[], float] = time.monotonic
    gain: Gain = field(default_factory=Gain)
    _columns: tuple[Column, ...] = ()
    _num_lines: int = 0
    _num_steps: int = 0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Write a step's line; metrics of a validation alone, which has no reward of training, as they are.

        Args:
            data: metrics by verl's names.
            step: number of the step, from 1.
        """
        if REWARD not in data:
            self._write(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in _numbers(data).items()))
            return
        self.gain = self.gain.with_step(data)
        self._num_steps += 1
        columns = tuple(column for column in COLUMNS if column.metric in data)
        if self._num_lines % HEADER_EVERY == 0 or columns != self._columns:
            self._columns, self._num_lines = columns, 0
            self._write(" " * len(self._progress(step)) + "".join(f"  {column.title:>8}" for column in columns))
        self._num_lines += 1
        cells = "".join(f"  {column.show(data[column.metric]):>8}" for column in columns)
        self._write(self._progress(step) + cells)
        for name, value in _numbers(data).items():
            if name.startswith("val-core/"):
                self._write(f"  {name} {value:.4g}")

    def flush(self) -> None:
        """verl asks for it."""
        self.stream.flush()

    def close(self) -> None:
        """Write what sharing gained over all steps."""
        for line in self.gain.lines():
            self._write(line)

    def _progress(self, step: int) -> str:
        """A bar, the step, and the time that the rest takes at the pace so far; of one width for all steps."""
        if self.total_steps is None:
            return f"step {step:>6}"
        done = min(1.0, step / self.total_steps)
        bar = "#" * round(BAR_WIDTH * done)
        # A run that goes on from a checkpoint does not begin with step 1; the lines written are those of this one.
        pace = (self.clock() - self._started) / max(self._num_steps, 1)
        left = round(pace * max(self.total_steps - step, 0))
        width = len(str(self.total_steps))
        clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        return f"[{bar:.<{BAR_WIDTH}}] step {step:>{width}}/{self.total_steps} left {clock:>8}"

    def _write(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in data.items() if isinstance(value, (int, float))}
