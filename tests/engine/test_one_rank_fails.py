"""An error on one of two ranks in the middle of a mini-batch ends both: no rank waits for one that is gone."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu

from tests.conftest import free_port
from tests.engine.carried_cases import ONE_GROUP
from tests.support import actor_loss, group, make_engine, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

MOST_SECONDS = 30
SAMPLES = [*ONE_GROUP, *group(6, [7, 1], 3), *group(9, [4, 4], 2), *group(5, [9, 8], 5), *group(7, [3, 6], 6)]


def failing_loss(**kwargs: Any) -> Any:
    raise ZeroDivisionError("the fault of rank 1")


def run(rank: int, path: str, store: str, failing: Any) -> None:
    """An update whose loss fails on rank 1, in a process that ends with the error, as verl's worker does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    engine = make_engine(path, splits=True)
    rows = range(8) if rank == 0 else range(8, len(SAMPLES))
    batch = tu.index_select_tensor_dict(make_batch(SAMPLES, max_token_len_per_gpu=36), list(rows))
    failing.wait()
    with engine.train_mode():
        engine.forward_backward_batch(batch, failing_loss if rank == 1 else actor_loss())


def test_an_error_in_a_forward_of_one_rank_ends_both_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    path, store, failing = save_tiny_model(tmp_path), f"tcp://127.0.0.1:{free_port()}", context.Barrier(3)
    processes = [context.Process(target=run, args=(rank, path, store, failing)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        failing.wait(timeout=120)
        start = time.monotonic()
        for process in processes:
            process.join(timeout=max(start + MOST_SECONDS - time.monotonic(), 0))
        assert [process.exitcode for process in processes] == [1, 1], "a rank waits for one that is gone"
    finally:
        for process in processes:
            process.kill()
