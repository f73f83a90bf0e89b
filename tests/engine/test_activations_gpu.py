"""Activation levels on a GPU in bf16: the same bits, the planned memory, and no host synchronization."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.batches import make_batch

from tests.engine.test_activations import recording, same_bits, update_at
from tests.engine.test_gpu import two_groups
from tests.precision import BF16, GPU_SIZES
from tests.support import clone, group, make_engine, save_tiny_model, split_always, splitting
from verl_pg_plugin.attention.kernels import kernel_obstacle
from verl_pg_plugin.engine import activations
from verl_pg_plugin.planning.activation_level import Level

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("process_group")]

LAYERS = 8
NO_FOUR = kernel_obstacle("flash_attn_4", "cuda")
KERNELS = [  # flash-attn 4 compiles for a minute or more
    "flash_attn_2",
    pytest.param("flash_attn_4", marks=[pytest.mark.slow, pytest.mark.skipif(bool(NO_FOUR), reason=NO_FOUR)]),
]
ON_HOST = [Level.ATTENTION_ON_HOST, Level.INPUTS_ON_HOST]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), **{**GPU_SIZES, "num_hidden_layers": LAYERS})


@pytest.fixture(autouse=True)
def same_numbers_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    monkeypatch.setattr(activations, "SMALLEST", 1)


def engine_of(path: str, kernel: str = "flash_attn_2", **options: Any) -> Any:
    return make_engine(path, engine={**BF16, "attention_kernel": kernel, **options})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"compile_layers": True}], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize("budget", [4096, 480], ids=["whole groups", "split groups"])
def test_a_level_changes_no_bit_of_any_gradient(qwen3: str, kernel: str, options: dict, budget: int) -> None:
    """Each level twice, so that memory of earlier copies is reused."""
    engine = engine_of(qwen3, kernel, **options)
    if budget < 4096:
        split_always(engine)
        with splitting(engine):
            update_at(Level.ATTENTION, engine, two_groups(budget))
    assert same_bits([update_at(level, engine, two_groups(budget)) for level in (*Level, *Level)])


def test_fsdp1_and_slabs_that_neighbours_share_change_no_bit(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SLAB", 100_000)
    engine = make_engine(qwen3, strategy="fsdp", engine=BF16)
    assert same_bits([update_at(level, engine, two_groups(4096)) for level in (*Level, *ON_HOST)])


def test_what_waits_on_the_host_frees_all_layers_but_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the peak, in the last layer's backward, that layer and the one below it are on the device."""
    monkeypatch.setattr(activations, "SMALLEST", 1 << 20)
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    path = save_tiny_model(
        tmp_path, num_hidden_layers=LAYERS, intermediate_size=1024, max_position_embeddings=65536, **sizes
    )
    engine, peaks = engine_of(path), {}
    # Two equal micro-batches: in the second, all gradients are allocated from the start.
    batch = make_batch([*group(28672, [1024] * 4, 1), *group(28672, [1024] * 4, 2)], max_token_len_per_gpu=33000)
    tokens = 28672 - 1 + 4 * 1024
    assert [p.layout.num_tokens for p in engine.plan(clone(batch), forward_only=False).micro_batches] == [tokens] * 2
    for level in (Level.ATTENTION, *ON_HOST, Level.ATTENTION, Level.ATTENTION_ON_HOST):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        update_at(level, engine, batch)
        peaks[level] = torch.cuda.max_memory_allocated()
    inputs, attention = 2 * 512, 8 * (2 * 64 + 4)
    saved = peaks[Level.ATTENTION] - peaks[Level.ATTENTION_ON_HOST]
    assert saved == pytest.approx((LAYERS - 2) * tokens * (inputs + attention), rel=0.05)
    assert peaks[Level.INPUTS_ON_HOST] <= peaks[Level.ATTENTION_ON_HOST]


@pytest.mark.parametrize("level", [Level.ATTENTION, *ON_HOST])
def test_the_host_waits_for_nothing_between_layers(qwen3: str, level: Level) -> None:
    engine, calls = engine_of(qwen3), Counter()
    update_at(level, engine, two_groups(4096))  # compiles kernels and pins memory

    def watch(name: str) -> None:
        """From the first attention call to the last, of the forward and of the backward."""
        calls[name] += 1
        mode = {1: "error", LAYERS: "default"}.get(calls[name])
        if mode is not None and (name == "backward" or calls["backward"] == 0):
            torch.cuda.set_sync_debug_mode(mode)

    recording(engine, watch)
    try:
        update_at(level, engine, make_batch(group(300, [60], 1)))  # one sequence: a layer calls the kernel once
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert calls["backward"] == LAYERS


def test_memory_of_an_update_in_split_groups_is_given_back(qwen3: str) -> None:
    engine, allocated = engine_of(qwen3), []
    split_always(engine)
    for _ in range(3):
        with splitting(engine):
            update_at(Level.ATTENTION_ON_HOST, engine, two_groups(480))
        engine.optimizer_zero_grad()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] == allocated[2]
