"""Rows and table of ``bench_step.py``, from the metrics files of training runs."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

PHASES = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "step")

TIMING = "timing_s/"
PEAK_GIB = "actor/perf/max_memory_allocated_gb"
TOKENS_PER_S = "perf/throughput"
MFU = "perf/mfu/actor"
DEDUP_RATIO = "actor/prefix_grouper/dedup_ratio"
ATTENTION_BACKEND = "actor/prefix_grouper/attention_backend/"


@dataclass(frozen=True)
class StepRow:
    """One phase of one run: seconds of the steps after the first, which warms up.

    ``speedup`` is over ``rmpad`` of the same case. ``peak_gib`` is the training worker's peak, without the rollout
    engine's process. ``tokens_per_s_per_gpu`` counts prompt and response tokens of a whole step. ``mfu`` is verl's for
    the update, which counts a shared prompt once for each response. ``outcome`` is ``ok``, or why the run ended early.
    """

    model: str
    case: str
    mode: str
    phase: str
    seconds_median: float
    seconds_min: float
    seconds_max: float
    speedup: float | None
    steps_measured: int
    peak_gib: float
    memory_ratio: float | None
    tokens_per_s_per_gpu: float
    prompt_tokens: float
    response_tokens: float
    mfu: float
    dedup_ratio: float | None
    attention_kernel: str | None
    outcome: str
    num_gpus: int
    max_token_len: int
    rollout: str
    cuda_graphs: bool
    gpu_memory_utilization: float
    overrides: str
    device: str
    driver: str
    versions: str
    commit: str


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
        "tokens_per_s_per_gpu": middle(TOKENS_PER_S),
        "prompt_tokens": middle("prompt_length/mean"),
        "response_tokens": middle("response_length/mean"),
        "mfu": middle(MFU),
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


def table_of(rows: list[StepRow]) -> Table:
    """Return a table with a line for each phase; figures of a whole run are in its line ``step``."""
    table = Table("case", "mode", "phase", "median s", "min..max", "speed-up", "GiB", "tokens/s", "dedup")
    for row in rows:
        whole = row.phase == "step"
        figures = (row.speedup, row.peak_gib, row.tokens_per_s_per_gpu, row.dedup_ratio)
        shown = [f"{figure:.2f}" if figure is not None else "" for figure in figures]
        table.add_row(
            row.case,
            row.mode if row.outcome == "ok" else f"{row.mode} ({row.outcome})",
            row.phase,
            f"{row.seconds_median:.2f}",
            f"{row.seconds_min:.2f}..{row.seconds_max:.2f}",
            shown[0],
            *(shown[1:] if whole else [""] * 3),
            end_section=whole,
        )
    return table
