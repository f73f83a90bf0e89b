"""Run a function on several ranks, of gloo or of a GPU each, and hand back what each returns."""

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.conftest import free_port


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Any]:
    """``function(rank, *args)`` in ``world_size`` processes; an error in any of them is raised here.

    With ``device="cuda"`` every process has a GPU of its own, and collectives go through nccl.
    """
    context = mp.get_context("spawn")
    results, received = context.SimpleQueue(), context.Event()
    store = f"tcp://127.0.0.1:{free_port()}"
    arguments = (world_size, device, store, results, received, function, args)
    processes = mp.spawn(_run, arguments, nprocs=world_size, join=False)
    by_rank: dict[int, Any] = {}
    try:
        while len(by_rank) < world_size:
            if results.empty():
                processes.join(timeout=0.1)  # raises what ended a process before it could answer
            else:
                rank, result = results.get()
                by_rank[rank] = result
    except BaseException:  # a test's timeout too: ranks that wait for each other would keep pytest from ending
        for process in processes.processes:
            process.kill()
        raise
    received.set()  # tensors travel in memory of their process, which must not end before
    processes.join()
    failures = [result.text for result in by_rank.values() if isinstance(result, Failure)]
    assert not failures, "\n".join(failures)
    return [by_rank[rank] for rank in range(world_size)]


class Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _run(
    rank: int,
    world_size: int,
    device: str,
    store: str,
    results: Any,
    received: Any,
    function: Callable[..., Any],
    args: tuple,
) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("VERL_PLATFORM", "cpu")
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    try:
        result = function(rank, *args)
    except Exception:
        result = Failure(traceback.format_exc())
    results.put((rank, result))
    received.wait()
    dist.destroy_process_group()
