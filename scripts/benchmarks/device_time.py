"""From the events of torch's profiler to the seconds of a phase by kernel class, and what the device waited for.

On a GPU the events are its kernels and copies. On a CPU, where there are none, aten's operators stand for them, each
with the time that none of its callees took: a rehearsal of the same arithmetic, not a measurement of a GPU.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

from benchmarks.kernel_classes import COLLECTIVES, HEAD, HOST_COPIES, IDLE, OPTIMIZER, OTHER, kernel_class

Interval = tuple[float, float]
"""Begin and end, in microseconds of the profiler's clock."""

MARK = "profile_actor/"
BATCH, STEP, INPUTS, HEAD_MARK, OPTIMIZER_MARK = (
    MARK + name for name in ("batch", "forward_step", "inputs", "head", "optimizer")
)
BACKWARD_FUNCTION = 1  # at::RecordScope, of events that autograd's engine runs


@dataclass(frozen=True)
class PhaseProfile:
    """Seconds of one phase on this rank.

    Attributes:
        wall: from the batch on the host to the last work of the device.
        classes: by kernel class, ``IDLE`` among them. Streams run at once, so they may add up to more than ``wall``.
        idle: the idle seconds, by what the host did meanwhile.
        host: seconds of the host by what it did, waiting for the device included.
        unnamed: the kernels of class ``OTHER`` by name.
        micro_batches: number of them.
    """

    wall: float
    classes: dict[str, float]
    idle: dict[str, float]
    host: dict[str, float]
    unnamed: dict[str, float]
    micro_batches: int


@contextmanager
def marked(engine: Any) -> Iterator[None]:
    """Within the block, ``engine`` marks its stages in the profile; stock engines and ours have the same ones."""
    names = {
        "forward_backward_batch": BATCH,
        "forward_step": STEP,
        "prepare_model_inputs": INPUTS,
        "prepare_model_outputs": HEAD_MARK,
        "optimizer_step": OPTIMIZER_MARK,
    }
    head = engine.module.get_output_embeddings()
    ranges: list[record_function] = []

    def enter(*_: Any) -> None:
        ranges.append(record_function(HEAD_MARK))
        ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    hooks = [head.register_forward_pre_hook(enter, prepend=True), head.register_forward_hook(leave)]
    for name, mark in names.items():
        setattr(engine, name, _in_range(getattr(engine, name), mark))
    try:
        yield
    finally:
        for name in names:
            delattr(engine, name)
        for hook in hooks:
            hook.remove()


def _in_range(method: Any, mark: str) -> Any:
    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(mark):
            return method(*args, **kwargs)

    return run


def read_profile(events: Iterable[FunctionEvent], on_gpu: bool) -> PhaseProfile:
    """The one phase that ran while the profiler looked on.

    Args:
        events: ``torch.profiler.profile.events()``; the engine was ``marked``.
        on_gpu: else operators of the CPU are what is counted.

    Raises:
        ValueError: no marked batch ran, or more than one.
    """
    events = list(events)
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    marks = {mark: _intervals(event for event in on_host if event.name == mark) for mark in _MARKS}
    if len(marks[BATCH]) != 1:
        raise ValueError(f"{len(marks[BATCH])} batches in the profile; one is needed")
    start = marks[BATCH][0][0]
    work = [event for event in events if _is_work(event, on_gpu) and event.time_range.start >= start]
    busy = _union(span for event in work for span in _own(event, on_gpu))
    end = max(interval[1] for interval in [*marks[BATCH], *marks[OPTIMIZER_MARK], *busy])

    seconds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for event in work:
        names[event.name] += _seconds(event, on_gpu)
    for name, taken in names.items():
        seconds[kernel_class(name)] += taken
    for scope, name, taken in _scoped(on_host, on_gpu):
        # A range has a shadow on the device too, which is no kernel.
        if name in names and (found := kernel_class(name)) not in (COLLECTIVES, HOST_COPIES):
            seconds[found] -= taken
            names[name] -= taken
            seconds[scope] += taken
    stages = _stages(marks, start, end)
    gaps = _gaps(busy, start, end)
    idle = {stage: _overlap(gaps, spans) for stage, spans in stages.items()}
    return PhaseProfile(
        wall=(end - start) / 1e6,
        classes=dict(seconds) | {IDLE: sum(end - begin for begin, end in gaps) / 1e6},
        idle=idle,
        host={stage: sum(end - begin for begin, end in spans) / 1e6 for stage, spans in stages.items()},
        unnamed={name: taken for name, taken in names.most_common() if kernel_class(name) == OTHER and taken > 0},
        micro_batches=len(marks[STEP]),
    )


_MARKS = (BATCH, STEP, INPUTS, HEAD_MARK, OPTIMIZER_MARK)


def _is_work(event: FunctionEvent, on_gpu: bool) -> bool:
    if event.is_user_annotation or event.device_type != (DeviceType.CUDA if on_gpu else DeviceType.CPU):
        return False
    # What autograd's engine, FSDP and the profiler spend on themselves is the host's.
    space, operator, _ = event.name.partition("::")
    return on_gpu or bool(operator and not event.is_async and space not in ("autograd", "profiler", "FSDP"))


def _own(event: FunctionEvent, on_gpu: bool) -> list[Interval]:
    """When the kernel ran; of an operator, when none of its callees did."""
    callees = [] if on_gpu else _union(_intervals(event.cpu_children))
    return _gaps(callees, event.time_range.start, event.time_range.end)


def _seconds(event: FunctionEvent, on_gpu: bool) -> float:
    return sum(end - begin for begin, end in _own(event, on_gpu)) / 1e6


def _scoped(on_host: list[FunctionEvent], on_gpu: bool) -> Iterator[tuple[str, str, float]]:
    """Class, name and seconds of the kernels that the head, its backward and the optimizer launched."""
    heads = [event for event in on_host if event.name == HEAD_MARK]
    # Autograd numbers its nodes on each thread; a node of the backward knows the number and the thread of its forward.
    nodes = {(event.thread, event.sequence_nr) for head in heads for event in _callees(head) if event.sequence_nr > 0}
    backwards = [
        event
        for event in on_host
        if event.scope == BACKWARD_FUNCTION and (event.fwd_thread, event.sequence_nr) in nodes
    ]
    optimizers = [event for event in on_host if event.name == OPTIMIZER_MARK]
    for scope, roots in ((HEAD, heads + backwards), (OPTIMIZER, optimizers)):
        launched = {id(event): event for root in roots for event in [root, *_callees(root)]}
        for event in launched.values():
            if on_gpu:
                yield from ((scope, kernel.name, kernel.duration / 1e6) for kernel in event.kernels)
            elif _is_work(event, on_gpu):
                yield scope, event.name, _seconds(event, on_gpu)


def _callees(event: FunctionEvent) -> Iterator[FunctionEvent]:
    for child in event.cpu_children:
        yield child
        yield from _callees(child)


def _stages(marks: dict[str, list[Interval]], start: float, end: float) -> dict[str, list[Interval]]:
    """What the host did between ``start`` and ``end``, without gaps."""
    steps, inputs, optimizer = marks[STEP], marks[INPUTS], marks[OPTIMIZER_MARK]
    ready = [next(stop for begin, stop in inputs if first <= begin <= last) for first, last in steps]
    last_step = steps[-1][1] if steps else start
    after_batch = min(marks[BATCH][0][1], end)
    return {
        "planning": [(start, steps[0][0])] if steps else [],
        "inputs of micro-batches": [(first, at) for (first, _), at in zip(steps, ready, strict=True)],
        "forward": [(at, last) for (_, last), at in zip(steps, ready, strict=True)],
        "backward": [
            *((last, first) for (_, last), (first, _) in itertools.pairwise(steps)),
            (last_step, after_batch),
        ],
        "optimizer": optimizer,
        "rest": _gaps(_union([(start, after_batch), *optimizer]), start, end),
    }


def _intervals(events: Iterable[FunctionEvent]) -> list[Interval]:
    return sorted((event.time_range.start, event.time_range.end) for event in events)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _gaps(busy: list[Interval], start: float, end: float) -> list[Interval]:
    """What ``busy``, sorted and disjoint, leaves of ``start .. end``."""
    edges = [start, *(edge for interval in busy for edge in interval), end]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(max(begin, start), min(stop, end)) for begin, stop in pairs if min(stop, end) > max(begin, start)]


def _overlap(gaps: list[Interval], spans: list[Interval]) -> float:
    """Seconds that lie in both; the intervals of each are disjoint."""
    shared = (min(a[1], b[1]) - max(a[0], b[0]) for a in gaps for b in spans)
    return sum(length for length in shared if length > 0) / 1e6


def device_activities() -> list[torch.profiler.ProfilerActivity]:
    """Of the host, and of a GPU where there is one."""
    activity = torch.profiler.ProfilerActivity
    return [activity.CPU, activity.CUDA] if torch.cuda.is_available() else [activity.CPU]
