"""Run a function on several ranks, of gloo or of a GPU each, and hand back what each returns."""

import atexit
import gc
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.conftest import free_port

SECONDS_BEHIND_A_FAILURE = 30.0


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Any]:
    """``function(rank, *args)`` in ``world_size`` processes; an error in any of them is raised here.

    With ``device="cuda"`` every process has a GPU of its own, and collectives go through nccl. Two CPU ranks are the
    same processes in all tests, since importing torch and verl takes longer than most of what they run.
    """
    key = (world_size, device)
    pool = _pools.pop(key, None) or _Pool(*key)
    try:
        results = pool.run(function, args)
    except BaseException:  # a test's timeout too: ranks that wait for each other would keep pytest from ending
        pool.close()
        raise
    if key == (2, "cpu"):
        _pools[key] = pool
    else:
        pool.close()
    return results


class _Pool:
    """Ranks of one process group, which wait for functions to run."""

    def __init__(self, world_size: int, device: str) -> None:
        context = mp.get_context("spawn")
        store = f"tcp://127.0.0.1:{free_port()}"
        self.processes, self.connections = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, device, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, function: Callable[..., Any], args: tuple) -> list[Any]:
        for connection in self.connections:
            connection.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < len(self.processes):
            waiting = [rank for rank in range(len(self.processes)) if rank not in results]
            failed = any(isinstance(result, Failure) for result in results.values())
            ready = wait(
                [*(self.connections[rank] for rank in waiting), *(p.sentinel for p in self.processes)],
                timeout=SECONDS_BEHIND_A_FAILURE if failed else None,
            )
            if not ready:
                break  # the others wait for the rank that failed
            for rank in waiting:
                if self.connections[rank] in ready:
                    results[rank] = self._answer(rank)
                elif self.processes[rank].sentinel in ready:
                    raise self._ended(rank)
        failures = [result.text for result in results.values() if isinstance(result, Failure)]
        if failures:
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in range(len(self.processes))]

    def _answer(self, rank: int) -> Any:
        try:
            return self.connections[rank].recv()
        except EOFError:
            raise self._ended(rank) from None

    def _ended(self, rank: int) -> "RankEndedError":
        self.processes[rank].join()
        return RankEndedError(rank, self.processes[rank].exitcode)

    def close(self) -> None:
        for process in self.processes:
            process.kill()


class RankEndedError(RuntimeError):
    """A rank's process ended before it answered."""

    def __init__(self, rank: int, exit_code: int | None) -> None:
        super().__init__(f"rank {rank} ended with exit code {exit_code}")


_pools: dict[tuple[int, str], _Pool] = {}
atexit.register(lambda: [pool.close() for pool in _pools.values()])


class Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _serve(rank: int, world_size: int, device: str, store: str, connection: Connection) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("VERL_PLATFORM", "cpu")
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    while True:
        function, args = connection.recv()
        try:
            result = function(rank, *args)
        except Exception:
            result = Failure(traceback.format_exc())
        connection.send(result)  # tensors travel in memory of this process, which lives on
        del function, args, result
        gc.collect()
