"""On a GPU: kept layers hold what was measured, give the gradients of recomputed ones, and ``auto`` finds its way."""

import gc

import pytest
import torch

from tests.engine.test_gpu import BF16
from tests.engine.test_kept_layers import update
from tests.support import group, make_engine, save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("process_group"),
]

LAYERS = 8
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "initializer_range": 0.02,
}
SAMPLES = group(6000, [500, 700, 300, 600], 1)
BUDGET = 9000
COMPILED = [False, True]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), **SIZES)


@pytest.mark.parametrize("compiled", COMPILED, ids=["eager", "compiled"])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_more_layers_raise_the_peak_by_what_they_hold_and_change_no_bit(
    qwen3: str, compiled: bool, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    options = {**BF16, "compile_layers": compiled, "keep_activations": "all", "use_orig_params": True}
    engine = make_engine(qwen3, packed=True, strategy=strategy, engine=options)
    update(engine, SAMPLES, BUDGET)
    (held,) = engine.keeper.budget.bytes_per_row.values()
    layer = held * (5999 + 2100)
    peaks, gradients = {}, {}
    for layers in (0, 2, 6):
        engine.keeper.budget.asked = (layers + 0.5) * layer / 2**30
        engine.optimizer_zero_grad()
        torch.cuda.reset_peak_memory_stats()
        metrics, found = update(engine, SAMPLES, BUDGET)
        peaks[layers] = torch.cuda.max_memory_allocated()
        gradients[layers] = {name: gradient.cpu() for name, gradient in found.items()}
        del found  # on the GPU it would count as memory of the next update
        assert metrics["prefix_grouper/kept_layers"] == [float(layers)]
    assert peaks[6] - peaks[2] == pytest.approx(4 * layer, rel=0.05)
    assert peaks[2] - peaks[0] <= 2.1 * layer
    for layers in (2, 6):
        assert all(torch.equal(gradients[layers][name], want) for name, want in gradients[0].items())


@pytest.mark.parametrize("compiled", COMPILED, ids=["eager", "compiled"])
def test_kept_mlps_take_less_than_kept_layers_and_change_no_bit(
    qwen3: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    peaks, gradients = [], []
    for keep in ("attention", "mlp", "all"):
        engine = make_engine(qwen3, packed=True, engine={**BF16, "compile_layers": compiled, "keep_activations": keep})
        for _ in range(2):  # the first compiles
            torch.cuda.reset_peak_memory_stats()
            found = {name: gradient.cpu() for name, gradient in update(engine, SAMPLES, BUDGET)[1].items()}
        peaks.append(torch.cuda.max_memory_allocated())
        gradients.append(found)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    assert peaks[0] < peaks[1] < peaks[2]
    for kept in gradients[1:]:
        assert all(torch.equal(kept[name], want) for name, want in gradients[0].items())


@pytest.mark.parametrize("compiled", COMPILED, ids=["eager", "compiled"])
def test_memory_that_ends_starts_the_mini_batch_over_with_fewer_layers_and_changes_no_bit(
    qwen3: str, compiled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    engine = make_engine(qwen3, packed=True, engine={**BF16, "compile_layers": compiled, "keep_activations": "all"})
    update(engine, group(300, [50], 2), BUDGET)
    (held,) = engine.keeper.budget.bytes_per_row.values()
    engine.keeper.budget.asked = 1e-9
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    expected = {name: gradient.cpu() for name, gradient in update(engine, SAMPLES, BUDGET)[1].items()}
    room = torch.cuda.max_memory_reserved() + 3.5 * held * (5999 + 2100)
    engine.optimizer_zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        engine.keeper.budget.asked = "all"
        for _ in range(2):
            metrics, found = update(engine, SAMPLES, BUDGET)
            assert 0 < metrics["prefix_grouper/kept_layers"][0] < LAYERS
            assert all(torch.equal(found[name].cpu(), want) for name, want in expected.items())
            del found
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of memory; the mini-batch starts over" in caplog.text


@pytest.mark.parametrize("compiled", COMPILED, ids=["eager", "compiled"])
def test_auto_keeps_all_layers_of_a_small_model_and_none_on_a_device_that_is_full(qwen3: str, compiled: bool) -> None:
    engine = make_engine(qwen3, packed=True, engine={**BF16, "compile_layers": compiled, "keep_activations": "auto"})
    kept = []
    before_training = torch.empty(int(0.8 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda")
    del before_training  # a peak that no update had
    torch.cuda.empty_cache()
    for full in (False, False, False, True, False):
        free, total = torch.cuda.mem_get_info()
        ballast = [torch.empty(int(free - 0.1 * total), dtype=torch.uint8, device="cuda")] if full else []
        metrics, _ = update(engine, SAMPLES, BUDGET)
        ballast.clear()
        torch.cuda.empty_cache()
        kept.extend(metrics["prefix_grouper/kept_layers"])
        with engine.train_mode():
            engine.optimizer_step()
    assert kept == [0.0, 1.0, float(LAYERS), 0.0, float(LAYERS)]
