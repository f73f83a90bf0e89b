"""Requirements for any mixer, shown by one of twenty lines, and refusals."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.batches import make_batch

from tests import support
from tests.engine.carried_cases import ONE_GROUP
from tests.mixers.hybrids import SAMPLES, save_hybrid
from tests.mixers.toy import CONVOLUTION
from verl_pg_plugin.attention import kernels
from verl_pg_plugin.issue import SHARING_OFF
from verl_pg_plugin.mixers import MIXERS, gated_delta
from verl_pg_plugin.planning.memory import TokenBytes

TREE = [*support.group(7, [5, 2, 3], 1), *SAMPLES[-3:]]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "full_attention"]}
    return support.save_tiny_model(tmp_path_factory.mktemp("toy"), "lfm2", **layers)


@pytest.fixture
def with_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, CONVOLUTION.name, CONVOLUTION)


@pytest.mark.parametrize(
    "options", [{"verify": "first"}, pytest.param({"compile_layers": True}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.usefixtures("with_convolutions")
def test_a_mixer_of_twenty_lines_is_exact(toy: str, options: dict) -> None:
    batch, engine = make_batch(TREE, max_token_len_per_gpu=28), support.make_engine(toy, engine=options)
    support.check_exact(engine, toy, batch)
    assert engine.shared_model.layers == {"attention": 2, "convolution": 1}
    assert not engine.shared_model.prefix_cache, "so its groups are not split"


@pytest.mark.usefixtures("with_convolutions")
def test_missing_ulysses_support_and_skipped_layers_are_errors(toy: str, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"convolution layers of lfm2: they cannot run with Ulysses.*_parallel_size=1"):
        support.make_engine(toy, engine={"ulysses_sequence_parallel_size": 2})
    monkeypatch.setitem(MIXERS, CONVOLUTION.name, replace(CONVOLUTION, install=lambda module: None))
    with pytest.raises(RuntimeError, match=f"convolution over shared prefixes ran in 0 of 1 layers.*{SHARING_OFF}"):
        support.infer(support.make_engine(toy), make_batch(TREE))


def test_cache_memory_matches_the_plan_and_outputs_are_exact(tmp_path: Path) -> None:
    """In float32; gradients of decays, which are exact in float64 only, are in test_gated_delta.py."""
    engine = support.make_engine(save_hybrid(tmp_path), splits=True)
    batch = make_batch(ONE_GROUP, max_token_len_per_gpu=36)
    sizes = TokenBytes.of(engine.module.config, itemsize=4)
    assert (sizes.caching_layers, sizes.state) == (1, 2 * 4 * (4 * 8 * 8 + 3 * 64))
    cached = len(ONE_GROUP[0].prompt) - 1  # sequences fork one token early
    with support.splitting(engine):
        metrics = support.infer(engine, batch)["metrics"], support.update(engine, batch).metrics
    expected = cached * sizes.key_value + sizes.state, sizes.cache_bytes(cached, states=1)
    for of_phase, layers in zip(metrics, expected, strict=True):
        (gib,) = of_phase["prefix_grouper/prefix_cache_gib"]
        assert 0 <= gib * 2**30 - layers <= 32 * cached, "and a few outputs of the head"
    support.check_outputs(engine, str(tmp_path), batch)


@pytest.mark.parametrize(
    ("generations", "triton", "packages", "refusal"),
    [
        ({9}, "3.4.0", {"fla"}, r"wrong on Hopper with Triton 3\.4 .*\(3\.4\.0\): pip install .*triton>=3\.7\.1"),
        ({9}, "3.7.0", {"fla"}, "wrong on Hopper"),
        ({9}, "3.3.1", {"fla"}, None),
        ({9}, "3.7.1", {"fla"}, None),
        ({9}, "3.6.0", {"fla", "tilelang"}, None),
        ({8, 10}, "3.6.0", {"fla"}, None),
        ({9}, "3.7.1", set(), "not installed: pip install fla-core$"),
    ],
    ids=["faulty", "late faulty", "older", "fixed", "tilelang", "other GPUs", "no fla"],
)
def test_machines_with_a_wrong_backward_are_refused(monkeypatch, generations, triton, packages, refusal) -> None:
    monkeypatch.setattr(gated_delta, "gpu_generations", lambda: generations)
    monkeypatch.setattr(gated_delta, "find_spec", lambda name: object() if name in packages else None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    obstacles = gated_delta.kernel_obstacles("cuda")
    assert len(obstacles) == (refusal is not None)
    assert all(re.search(refusal, why) for why in obstacles)
    assert gated_delta.kernel_obstacles("cpu") == []


def test_gpu_generations_come_from_nvidia_smi_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = "NVIDIA RTX A6000, 570.1, 8.6, 49140 MiB\nNVIDIA RTX 5090, 570.1, 12.0, 32607 MiB\n"
    done = subprocess.CompletedProcess([], 0, stdout=gpus)
    monkeypatch.setattr(kernels.subprocess, "run", lambda *args, **kwargs: done)
    monkeypatch.setattr(gated_delta.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(gated_delta.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gated_delta.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gated_delta.torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(kernels.shutil, "which", lambda name: name)
    assert gated_delta.gpu_generations() == {8, 12}
    done.stdout = "No devices were found\n"
    assert gated_delta.gpu_generations() == {9}
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    assert gated_delta.gpu_generations() == {9}
