"""Two processes: no rank waits for one that failed, and runs resume from checkpoints of either mode in either mode."""

import multiprocessing
import os
import re
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl

from tests.conftest import free_port
from tests.engine.carried_cases import ONE_GROUP
from tests.engine.ranks import graphs_as_they_are, on_ranks
from tests.engine.test_exactness import MIXED
from tests.support import actor_loss, clone, group, make_engine, save_tiny_model, update
from verl_pg_plugin.attention import kernels, passes
from verl_pg_plugin.attention.kernels import KERNELS
from verl_pg_plugin.engine import engine as engine_module
from verl_pg_plugin.engine import prepare
from verl_pg_plugin.planning.activation_level import Room
from verl_pg_plugin.synthetic import Sample, make_batch

SAMPLES = [*group(14, [5, 3, 8, 2], 1), *group(9, [4, 4], 2), *group(6, [7, 1], 3)]


def fail_on_rank_one(rank: int, path: str) -> list[str]:
    good, bad = make_batch(SAMPLES), make_batch([*SAMPLES[:-1], Sample([1, 2], [])])
    long = make_batch(SAMPLES, max_token_len_per_gpu=15)
    lone = [sample for seed in range(1 if rank else 9) for sample in group(5, [3], seed)]
    few = make_batch(lone, max_token_len_per_gpu=8)
    engine = make_engine(path)
    messages = []
    wrong = [bad, make_batch(SAMPLES).exclude("responses"), long]
    for batch in (*(wrong if rank == 1 else [good] * 3), few):
        try:
            update(engine, batch)
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    with (
        patch.object(engine_module, "get_device_name", lambda: "cuda"),
        patch.object(engine_module, "room_of_rank", side_effect=[OSError("no room") if rank else Room(1.0, 1.0)]),
        patch.object(engine, "ulysses_sequence_parallel_size", 2),
        pytest.raises((OSError, RuntimeError)) as raised,
    ):
        engine._levels(forward_only=False)
    messages.append(str(raised.value))
    update(engine, good)
    return messages


def build_on_unlike_machines(rank: int, path: str) -> dict[str, str]:
    """How building an engine ends on this rank where rank 1 lacks something, and then where it lacks nothing."""
    fast = replace(KERNELS["sdpa"], package="fast-attention" if rank == 1 else None, install="pip install it")
    either = patch.object(kernels, "candidates", lambda name, device: ("fast", "sdpa"))
    no_compiler = patch.dict(os.environ, {"CXX": "/nowhere/c++"}) if rank == 1 else nullcontext()
    compiles = (rank == 0, "it has a C++ compiler" if rank == 0 else "it has none: install g++")
    unlike = patch.object(prepare, "layer_compilation", lambda engine: compiles)
    cases: dict[str, tuple[dict, list[Any]]] = {
        "kernel": (
            {},
            [patch.dict(KERNELS, {"fast": fast}), either, patch.object(passes, "fast", passes.sdpa, create=True)],
        ),
        "compiler": ({}, [unlike]),
        "compiler, by name": ({"compile_layers": True}, [no_compiler]),
    }
    ended = {}
    for name, (options, patches) in cases.items():
        with ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            try:
                ended[name] = make_engine(path, engine=options).kernel.name
            except (ValueError, RuntimeError) as error:
                ended[name] = f"{type(error).__name__}: {error}"
    return ended


def run_failures(rank: int, path: str) -> tuple[list[str], dict[str, str]]:
    unlike = build_on_unlike_machines(rank, path)
    return fail_on_rank_one(rank, path), unlike  # builds an engine again, after ranks differed


@pytest.fixture(scope="module")
def failures(qwen3: str) -> list[tuple[list[str], dict[str, str]]]:
    return on_ranks(2, run_failures, qwen3)


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        (
            "kernel",
            r"attention kernel fast \(.* on ranks \[0\]; .*attention kernel sdpa \(.*fast needs fast-attention, which "
            r"is not installed: pip install it\).* on ranks \[1\]; .* set \+\+prefix_grouper\.attention_kernel=",
        ),
        (
            "compiler",
            r"layers compiled \(it has a C\+\+ compiler\) on ranks \[0\]; .*layers not compiled \(it has none: install "
            r"g\+\+\) on ranks \[1\]; .* set .*\+\+prefix_grouper\.compile_layers=False",
        ),
    ],
)
def test_a_rank_whose_machine_lacks_what_the_other_runs_stops_both(failures: list, lacking: str, told: str) -> None:
    (_, first), (_, second) = failures
    assert first[lacking] == second[lacking]
    assert re.search(rf"RanksDifferError: .*{told}", first[lacking])


def test_a_rank_that_cannot_compile_as_it_is_told_stops_both(failures: list) -> None:
    (_, told), (_, raised) = failures
    cause = raised["compiler, by name"]
    assert re.search(r"ValueError: .*needs a C\+\+ compiler.*compile_layers=False", cause)
    assert told["compiler, by name"] == f"RankError: rank 1: {cause}"


def test_a_bad_batch_on_one_rank_stops_both_and_the_next_one_runs(failures: list) -> None:
    (first, _), (second, _) = failures
    expected = (
        "sequence 7 has an empty response",
        "no responses",
        "ppo_max_token_len_per_gpu",
        "1 sequences cannot fill 9 micro-batches",
        "no room",
    )
    assert len(first) == len(second) == len(expected)
    for told, raised, cause in zip(first, second, expected, strict=True):
        assert cause in raised
        assert told.startswith("rank 1: ")
        assert cause in told


MOST_SECONDS = 30


def failing_loss(**kwargs: Any) -> Any:
    raise ZeroDivisionError("the fault of rank 1")


def run_to_the_end(rank: int, path: str, store: str, failing: Any) -> None:
    """An update whose loss fails on rank 1, in a process that ends with the error, as verl's worker does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    engine = make_engine(path, splits=True)
    batch = make_batch(SAMPLES if rank else ONE_GROUP, max_token_len_per_gpu=36)  # the first is split
    failing.wait()
    with engine.train_mode():
        engine.forward_backward_batch(batch, failing_loss if rank == 1 else actor_loss())


def test_an_error_in_a_forward_of_one_rank_ends_both_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    path, store, failing = save_tiny_model(tmp_path), f"tcp://127.0.0.1:{free_port()}", context.Barrier(3)
    processes = [context.Process(target=run_to_the_end, args=(rank, path, store, failing)) for rank in range(2)]
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


State = list[torch.Tensor]


def state_of(engine: Any) -> State:
    """Copies of this rank's shards of weights and of the optimizer's moments, in the order of the model."""
    moments = [engine.optimizer.state[p] for p in engine.module.parameters()]
    state = [*engine.module.parameters(), *(of[name] for of in moments for name in ("exp_avg", "exp_avg_sq", "step"))]
    return [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in state]


def resume(rank: int, path: str, strategy: str, folder: str) -> None:
    """Engines of both modes save, those of both resume, and each takes the step that the first took uninterrupted."""
    rows = tu.index_select_tensor_dict(make_batch(MIXED), list(range(rank, len(MIXED), 2)))

    def build(packed: bool) -> Any:
        compiled = packed and strategy == "fsdp"  # inside flat parameters
        return make_engine(path, packed=packed, strategy=strategy, engine={"compile_layers": True} if compiled else {})

    def step(engine: Any) -> State:
        with engine.train_mode():
            engine.train_batch(clone(rows), actor_loss())
        return state_of(engine)

    for saves in (True, False):
        through = build(saves)
        saved = step(through)
        through.save_checkpoint(f"{folder}/{saves}", global_step=1)
        later = step(through)
        for loads in (True, False):
            resumed = build(loads)
            resumed.load_checkpoint(f"{folder}/{saves}")
            assert all(map(torch.equal, state_of(resumed), saved))
            for got, want in zip(step(resumed), later, strict=True):
                assert saves != loads or torch.equal(got, want)
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def resume_on_a_cpu(*args: Any) -> None:
    # verl names the device of a checkpoint's weights with its number, and a CPU has none.
    with graphs_as_they_are(), patch.object(transformer_impl, "load_fsdp_model_to_gpu", lambda module: None):
        resume(*args)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_runs_resume_with_the_mode_toggled(qwen3: str, strategy: str, tmp_path: Path) -> None:
    """Weights and the optimizer's state."""
    on_ranks(2, resume_on_a_cpu, qwen3, strategy, str(tmp_path))
