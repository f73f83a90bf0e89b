"""Rows of ``bench_step.py``, from the metrics files of training runs."""

from collections import namedtuple
from statistics import median
from typing import Any

PHASES = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "step")
TIMING = "timing_s/"
PEAK_GIB = "actor/perf/max_memory_allocated_gb"
DEDUP_RATIO = "actor/prefix_grouper/dedup_ratio"
ATTENTION_BACKEND = "actor/prefix_grouper/attention_backend/"
COLUMNS = """
model case mode phase seconds_median seconds_min seconds_max speedup steps_measured peak_gib memory_ratio
tokens_per_s_per_gpu prompt_tokens response_tokens mfu dedup_ratio attention_kernel outcome num_gpus max_token_len
rollout cuda_graphs gpu_memory_utilization overrides device driver versions commit
"""


class StepRow(namedtuple("StepRow", COLUMNS)):
    """One phase of one run: seconds of the steps after the first, which warms up.

    ``speedup`` is over ``rmpad`` of the same case. ``peak_gib`` is the training worker's peak, without the rollout
    engine's process. ``tokens_per_s_per_gpu`` counts prompt and response tokens of a whole step. ``mfu`` is verl's for
    the update, which counts a shared prompt once for each response. ``outcome`` is ``ok``, or why the run ended early.
    """


def rows_of_run(steps: list[dict[str, float]], about: dict[str, Any]) -> list[StepRow]:
    """Return a row for each timed phase, without ratios; none if there is no step after the first.

    ``about`` has the fields that describe the run.
    """
    measured = steps[1:]
    if not measured:
        return []

    def middle(key: str) -> float | None:
        values = [step[key] for step in measured if key in step]
        return median(values) if values else None

    kernels = {key.removeprefix(ATTENTION_BACKEND) for step in measured for key in step if ATTENTION_BACKEND in key}
    shared = {
        "steps_measured": len(measured),
        "peak_gib": max(step[PEAK_GIB] for step in measured),
        "memory_ratio": None,
        "tokens_per_s_per_gpu": middle("perf/throughput"),
        "prompt_tokens": middle("prompt_length/mean"),
        "response_tokens": middle("response_length/mean"),
        "mfu": middle("perf/mfu/actor"),
        "dedup_ratio": middle(DEDUP_RATIO),
        "attention_kernel": ",".join(sorted(kernels)) or None,
    }
    rows = []
    for phase in PHASES:
        times = [step[TIMING + phase] for step in measured if TIMING + phase in step]
        if times:
            seconds = {"seconds_median": median(times), "seconds_min": min(times), "seconds_max": max(times)}
            rows.append(StepRow(phase=phase, speedup=None, **seconds, **shared, **about))
    return rows
