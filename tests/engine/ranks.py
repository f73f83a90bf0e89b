"""Run a function, or ``check_exact``, on several ranks, on gloo or with a GPU each."""

import atexit
import gc
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from verl.workers.engine.fsdp import transformer_impl

from tests.conftest import free_port
from tests.fresh import python
from tests.precision import in_float64
from tests.support import Result, check_exact, make_engine, run_reference

SECONDS_AFTER_A_FAILURE = 30.0


def on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, device: str = "cpu", folder: Path | None = None
) -> list[Any]:
    """Return the results of ``function(rank, *args)`` in ``world_size`` processes, or raise their first error.

    With ``device="cuda"`` each process has one GPU, and collectives use nccl. Tests with two CPU ranks reuse the
    processes of one pool for each ``folder`` of packages.
    """
    kind = world_size, device, folder
    with patch.object(sys, "path", [*sys.path, str(folder)]) if folder else nullcontext():
        pool = _pools.pop(kind, None) or _start(world_size, device)
        futures = [executor.submit(_call, function, rank, *args) for rank, executor in enumerate(pool)]
    try:
        _, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        wait(waiting, timeout=SECONDS_AFTER_A_FAILURE)  # for the rank that failed
        for error in filter(None, [future.exception() for future in futures if future.done()]):
            raise error
        results = [future.result() for future in futures]
    except BaseException:  # also a test's timeout: blocked ranks would keep pytest from ending
        _kill(pool)
        raise
    if (world_size, device) == (2, "cpu"):
        _pools[kind] = pool
    else:
        _kill(pool)
    return results


def check_exact_on_ranks(
    path: str,
    make: Callable[[], Any],
    sequences: list[list[int]] | None = None,
    num_ranks: int = 2,
    float64: bool = False,
    **options: Any,
) -> None:
    """Run ``check_exact`` on CPU ranks.

    Args:
        make: Returns the batch.
        sequences: Indices of each data-parallel rank's sequences; None for all.
        options: Arguments of ``make_engine``.
    """
    with in_float64() if float64 else nullcontext():
        expected = run_reference(path, make())  # once, not on every rank
    on_ranks(num_ranks, _check_exact, path, make, sequences, float64, expected, options)


def uncompiled_graphs() -> Any:
    """Trace with dynamo but run eagerly: code generation takes most of the time and is the same on all ranks."""
    return patch.object(torch, "compile", partial(torch.compile, backend="eager"))


def weights_stay_on_the_cpu() -> Any:
    """Skip verl's move of a checkpoint's weights to a device number, which a CPU lacks."""
    return patch.object(transformer_impl, "load_fsdp_model_to_gpu", lambda module: None)


def _check_exact(
    rank: int, path: str, make: Callable, sequences: Any, float64: bool, expected: Result, options: dict[str, Any]
) -> None:
    with in_float64() if float64 else nullcontext(), uncompiled_graphs():
        key = json.dumps([path, float64, options])
        if key not in _engines:
            _engines[key] = make_engine(path, **options)
        engine = _engines[key]
        mine = sequences and sequences[engine.get_data_parallel_rank()]
        check_exact(engine, path, make(), sequences=mine, splits=options.get("splits", False), expected=expected)


_engines: dict[str, Any] = {}
"""Of ``_check_exact`` in this rank, by their settings."""
_pools: dict[tuple[int, str, Path | None], list[ProcessPoolExecutor]] = {}
atexit.register(lambda: [_kill(pool) for pool in _pools.values()])


def _start(world_size: int, device: str) -> list[ProcessPoolExecutor]:
    """Start a process for each rank of a new group."""
    store, context = f"tcp://127.0.0.1:{free_port()}", mp.get_context("spawn")
    # CUDA fails in a forked process if the parent has queried its devices.
    context.set_executable(sys.executable if torch.cuda.is_available() else python())
    return [ProcessPoolExecutor(1, context, _join, (rank, world_size, device, store)) for rank in range(world_size)]


def _kill(pool: list[ProcessPoolExecutor]) -> None:
    for executor in pool:
        for process in (executor._processes or {}).values():
            process.kill()


def _join(rank: int, world_size: int, device: str, store: str) -> None:
    torch.set_num_threads(1)  # ranks share the cores, also on GPUs: references are computed on the CPU
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("VERL_PLATFORM", "cpu")
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    gc.collect()  # returned tensors are in shared memory of this process, which is reused
    return function(*args)
