"""Two processes: no rank blocks on one that failed, and either mode resumes from checkpoints of either mode."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from benchmarks.batches import Sample, make_batch
from torch.distributed.tensor import DTensor
from transformers.models.gemma3 import modeling_gemma3
from verl.utils import tensordict_utils as tu

from tests.architectures.tiny_configs import save_causal
from tests.conftest import free_port
from tests.engine.carried_cases import ONE_GROUP
from tests.engine.ranks import SECONDS_AFTER_A_FAILURE, on_ranks, weights_stay_on_the_cpu
from tests.engine.test_exactness import MIXED
from tests.fresh import python
from tests.support import actor_loss, check_exact, clone, group, make_engine, update
from verl_pg_plugin.attention import kernels, passes
from verl_pg_plugin.attention.kernels import KERNELS
from verl_pg_plugin.engine import engine as engine_module
from verl_pg_plugin.engine import prepare
from verl_pg_plugin.engine.prepare import RanksDifferError
from verl_pg_plugin.planning.activation_level import MemoryBudget

SAMPLES = [*group(14, [5, 3, 8, 2], 1), *group(9, [4, 4], 2), *group(6, [7, 1], 3)]


def raises_on_both(rank: int, cause: str) -> Any:
    """Expect ``cause`` on rank 1, and an error with the message of rank 1 on rank 0."""
    return pytest.raises((ValueError, RuntimeError, OSError), match=cause if rank else f"(?s)^rank 1: .*{cause}")


def fail_on_rank_one(rank: int, path: str) -> None:
    good, engine = make_batch(SAMPLES), make_engine(path)
    lone = [sample for seed in range(1 if rank else 9) for sample in group(5, [3], seed)]
    few = make_batch(lone, max_token_len_per_gpu=8)
    failing = {
        "sequence 7 has an empty prompt": make_batch([*SAMPLES[:-1], Sample([], [1, 2])]),
        "no responses": good.exclude("responses"),
        "ppo_max_token_len_per_gpu": make_batch(SAMPLES, max_token_len_per_gpu=15),
        "1 sequences cannot fill 9 micro-batches": few,
    }
    for cause, batch in failing.items():
        with raises_on_both(rank, cause):
            update(engine, batch if rank == 1 or batch is few else good)
    budgets = [MemoryBudget(rank, 3 - rank, 1 + rank), OSError("no room") if rank else MemoryBudget(0, 0)]
    with (
        patch.object(engine_module, "get_device_name", lambda: "cuda"),
        patch.object(engine_module, "memory_budget_of_rank", side_effect=budgets),
    ):
        assert engine._activation_policy(forward_only=False).memory == MemoryBudget(0, 2, 1), "the minimum over ranks"
        with raises_on_both(rank, "no room"):
            engine._activation_policy(forward_only=False)
    update(engine, good)


def test_an_error_on_one_rank_stops_both_and_the_next_batch_runs(qwen3: str) -> None:
    on_ranks(2, fail_on_rank_one, qwen3)


def build_on_unlike_machines(rank: int, path: str) -> None:
    fast = replace(KERNELS["sdpa"], package="fast-attention" if rank == 1 else None, install="pip install it")
    kernel = (
        r"attention kernel fast \(.* on ranks \[0\]; .*attention kernel sdpa \(.*fast needs fast-attention, which "
        r"is not installed: pip install it\).* on ranks \[1\]\. .* set \+\+prefix_grouper\.attention_kernel="
    )
    with (
        patch.dict(KERNELS, {"fast": fast}),
        patch.object(kernels, "candidates", lambda name, device: ("fast", "sdpa")),
        patch.object(passes, "fast", passes.sdpa, create=True),
        pytest.raises(RanksDifferError, match=kernel),
    ):
        make_engine(path)
    compiles = (rank == 0, "it has a C++ compiler" if rank == 0 else "it has none: install g++")
    compiler = (
        r"layers compiled \(it has a C\+\+ compiler\) on ranks \[0\]; .*layers not compiled \(it has none: install "
        r"g\+\+\) on ranks \[1\]\. .* set .*\+\+prefix_grouper\.compile_layers=False"
    )
    unlike = patch.object(prepare, "layer_compilation", lambda engine: compiles)
    with unlike, pytest.raises(RanksDifferError, match=compiler):
        make_engine(path)
    no_compiler = patch.dict(os.environ, {"CXX": "/nowhere/c++"}) if rank == 1 else nullcontext()
    with no_compiler, raises_on_both(rank, r"needs a C\+\+ compiler.*compile_layers=False"):
        make_engine(path, engine={"compile_layers": True})
    update(make_engine(path), make_batch(SAMPLES))


def test_ranks_with_different_kernels_or_compilers_are_refused(qwen3: str) -> None:
    on_ranks(2, build_on_unlike_machines, qwen3)


def run_to_the_end(rank: int, path: str, store: str, failing: Any) -> None:
    """Run an update whose loss fails on rank 1; the process ends with the error, as verl's worker does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    engine = make_engine(path, splits=True)
    batch = make_batch(SAMPLES if rank else ONE_GROUP, max_token_len_per_gpu=36)  # the first is split
    failing.wait()
    with engine.train_mode():
        engine.forward_backward_batch(batch, actor_loss() if rank == 0 else Mock(side_effect=ZeroDivisionError))


def test_an_error_in_a_forward_of_one_rank_ends_both_processes(qwen3: str) -> None:
    context = mp.get_context("spawn")
    context.set_executable(python())
    store, failing = f"tcp://127.0.0.1:{free_port()}", context.Barrier(3)
    processes = [context.Process(target=run_to_the_end, args=(rank, qwen3, store, failing)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        failing.wait(timeout=120)
        start = time.monotonic()
        for process in processes:
            process.join(timeout=max(start + SECONDS_AFTER_A_FAILURE - time.monotonic(), 0))
        assert [process.exitcode for process in processes] == [1, 1], "a rank blocks on one that has ended"
    finally:
        for process in processes:
            process.kill()


def state_of(engine: Any) -> list[torch.Tensor]:
    """Copies of this rank's shards of weights and optimizer state, in the order of the model."""
    moments = [engine.optimizer.state[p] for p in engine.module.parameters()]
    state = [*engine.module.parameters(), *(of[name] for of in moments for name in ("exp_avg", "exp_avg_sq", "step"))]
    return [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in state]


def resume(rank: int, path: str, strategy: str, folder: str) -> None:
    """Save and resume in both modes, and compare the next step with that of the uninterrupted engine."""
    rows = tu.index_select_tensor_dict(make_batch(MIXED), list(range(rank, len(MIXED), 2)))

    def build(packed: bool) -> Any:
        compiled = packed and strategy == "fsdp"  # inside flat parameters
        return make_engine(path, packed=packed, strategy=strategy, engine={"compile_layers": True} if compiled else {})

    def step(engine: Any) -> list[torch.Tensor]:
        with engine.train_mode():
            engine.train_batch(clone(rows), actor_loss())
        return state_of(engine)

    for saves in (True, False):
        through = build(saves)
        saved = step(through)
        through.save_checkpoint(f"{folder}/{saves}", global_step=1)
        later = step(through)
        for loads in (True, False) if saves else (True,):  # verl tests stock to stock
            resumed = build(loads)
            resumed.load_checkpoint(f"{folder}/{saves}")
            assert all(map(torch.equal, state_of(resumed), saved))
            for got, want in zip(step(resumed), later, strict=True):
                assert saves != loads or torch.equal(got, want)
                largest = max(want.abs().flatten().tolist(), default=0.0)
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * min(largest, 1.0))


def resume_on_a_cpu(*args: Any) -> None:
    uncompiled = patch.object(torch, "compile", lambda forward, **_: forward)  # only names of layers matter here
    with weights_stay_on_the_cpu(), uncompiled:
        resume(*args)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_runs_resume_with_the_mode_toggled(qwen3: str, strategy: str, tmp_path: Path) -> None:
    on_ranks(2, resume_on_a_cpu, qwen3, strategy, str(tmp_path))


def error_with_parameters_in_another_order(rank: int, path: str) -> str:
    def in_order(model: Any) -> Any:
        for layer in model.model.layers if rank else ():
            layer._modules["mlp"] = layer._modules.pop("mlp")  # now the last of its parts
        return model

    load = transformers.AutoModelForCausalLM.from_pretrained
    with (
        patch.object(
            transformers.AutoModelForCausalLM, "from_pretrained", lambda *args, **kw: in_order(load(*args, **kw))
        ),
        pytest.raises(ValueError) as caught,
    ):
        make_engine(path)
    return str(caught.value)


def test_ranks_with_parameters_in_different_orders_are_refused(qwen3: str) -> None:
    first, second = on_ranks(2, error_with_parameters_in_another_order, qwen3)
    assert first == second
    assert "ranks have other parameters or another order of them" in first


def check_with_buffers_in_another_order(rank: int, path: str, strategy: str) -> list[str]:
    """Return the names of the model's buffers; rank 1 iterates over sets as another hash seed would."""

    def in_order(values: Iterable[str]) -> list[str]:
        return sorted(dict.fromkeys(values), reverse=rank == 1)

    with patch.object(modeling_gemma3, "set", in_order, create=True):
        stock = transformers.AutoModelForCausalLM.from_pretrained(path)
        engine = make_engine(path, strategy=strategy)
    check_exact(engine, path, make_batch(MIXED), sequences=range(rank, len(MIXED), 2))
    return [name for name, _ in stock.named_buffers()]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_ranks_with_buffers_in_different_orders_are_exact(tmp_path: Path, strategy: str) -> None:
    """transformers registers the rotary frequencies of Gemma 3 in the order of a set."""
    path = save_causal(tmp_path, "gemma3_text")
    first, second = on_ranks(2, check_with_buffers_in_another_order, path, strategy)
    assert first != second
    assert sorted(first) == sorted(second)


CHECK_ON_A_RANK = """
import sys
import torch.distributed as dist
from tests.engine.test_two_ranks import MIXED, check_exact, make_batch, make_engine

dist.init_process_group("gloo")
sequences = range(dist.get_rank(), len(MIXED), 2)
check_exact(make_engine(sys.argv[1], strategy="fsdp"), sys.argv[1], make_batch(MIXED), sequences=sequences)
"""


@pytest.mark.slow
def test_ranks_with_unlike_hash_seeds_are_exact(tmp_path: Path) -> None:
    """With seeds 0 and 1 stock verl's ranks train Gemma 3 with each other's frequencies."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "VERL_PLATFORM": "cpu"}
    command = [sys.executable, "-c", CHECK_ON_A_RANK, save_causal(tmp_path, "gemma3_text")]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **group, "RANK": rank, "PYTHONHASHSEED": rank}) for rank in "01"
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
