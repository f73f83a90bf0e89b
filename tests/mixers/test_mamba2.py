"""Models with Mamba2 layers through the engine match every sequence alone, in float64; and what is refused."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from benchmarks.batches import make_batch
from torch import Tensor

from tests.mixers.hybrids import MAMBA2_KINDS, SAMPLES, config_of, samples_of, save_hybrid, trie_of_depth
from tests.precision import in_float64
from tests.support import check_exact, make_engine
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.mixers import mamba2

KINDS = [kind for kind in MAMBA2_KINDS if not mamba2.obstacles(transformers.AutoConfig.for_model(kind))]
COMPILES = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", autouse=True)
def float64() -> Iterator[None]:
    with in_float64():
        yield


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: save_hybrid(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_hybrids_match_single_sequences(kind: str, hybrids: dict) -> None:
    engine = make_engine(hybrids[kind])
    for samples in (SAMPLES, samples_of(trie_of_depth(4))):
        check_exact(engine, hybrids[kind], make_batch(samples))
    assert not engine.verifier.enabled
    num_mamba2, num_attention = {"falcon_h1": (4, 4), "nemotron_h": (2, 1)}.get(kind, (3, 1))
    assert engine.shared_model.layers == {"mamba2": num_mamba2, "attention": num_attention}
    assert mamba2.token_flops(config_of(kind)) == 5 * num_mamba2 * 8 * 8 * 16


VARIANTS: dict[str, dict[str, Any]] = {
    "bamba": {
        **{"mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_proj_bias": True},
        **{"time_step_limit": (0.4, 1.2), "mamba_d_conv": 3},
    },
    "falcon_h1": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "granitemoehybrid": {"num_local_experts": 0, "position_embedding_type": "rope"},
}


@pytest.mark.parametrize("kind", [kind for kind in VARIANTS if kind in KINDS])
def test_variants_match_single_sequences(kind: str, tmp_path) -> None:
    path = save_hybrid(tmp_path, kind, **VARIANTS[kind])
    check_exact(make_engine(path), path, make_batch(SAMPLES))


OPTIONS: dict[str, dict] = {
    "attention recomputed, verified": {"engine": {"activations": "inputs", "verify": "every_1"}},
    "nothing checkpointed, padded": {
        "model": {"enable_gradient_checkpointing": False},
        "engine": {"pad_to_length": True, "pad_to_length_bucket": 16},
    },
    "compiled": {"engine": {"compile_layers": True}},
}


@pytest.mark.parametrize("option", [*list(OPTIONS)[:-1], pytest.param("compiled", marks=COMPILES)])
def test_options_are_exact_and_chunks_compute_their_prompts(option: str, hybrids: dict, caplog) -> None:
    engine = make_engine(hybrids["granitemoehybrid"], splits=True, **OPTIONS[option])
    assert "compute its prefix again" in caplog.text
    got = check_exact(engine, hybrids["granitemoehybrid"], make_batch(SAMPLES, max_token_len_per_gpu=150))
    assert got.metrics["prefix_grouper/split_groups"] == [0.0]


def token_by_token(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    b, c = (tensor.repeat_interleave(x.shape[2] // b.shape[2], dim=2) for tensor in (b, c))
    outs = []
    for t in range(x.shape[1]):
        added = (dt[:, t, :, None] * x[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(2)
        state = (a * dt[:, t]).exp()[..., None, None] * state + added
        outs.append((state * c[:, t].unsqueeze(2)).sum(-1))
    return torch.stack(outs, 1), state


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 20])
def test_the_scan_matches_the_recurrence_token_by_token(num_tokens: int, groups: int) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    torch.manual_seed(0)
    in_groups = (2, num_tokens, groups, 5)
    x, dt, b, c = random(2, num_tokens, 4, 3), random(2, num_tokens, 4), random(*in_groups), random(*in_groups)
    a, state = random(4), random(2, 4, 3, 5)
    inputs = (x, dt, b, c, a, state)
    got = mamba2.scan(x, dt.sigmoid(), b, c, -a.exp(), state, size=8)
    want = token_by_token(x, dt.sigmoid(), b, c, -a.exp(), state)
    narrow = [tensor.float() for tensor in (x, dt.sigmoid(), b, c, -a.exp(), state)]
    expected = mamba2.scan(*narrow, size=8)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, mamba2.scan(*narrow, size=8), expected))
    weights = [torch.randn_like(out) for out in want]
    got = [*got, *torch.autograd.grad(got, inputs, weights)]
    want = [*want, *torch.autograd.grad(want, inputs, weights)]
    for actual, expected in zip(got, want, strict=True):
        assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_ulysses_missing_layouts_and_masks_are_errors(hybrids: dict) -> None:
    with pytest.raises(ValueError, match=r"mamba2 layers of bamba: they cannot run with Ulysses.*_parallel_size=1"):
        make_engine(hybrids["bamba"], engine={"ulysses_sequence_parallel_size": 2})
    engine = make_engine(hybrids["bamba"])
    tokens, context = torch.ones(1, 4, dtype=torch.int64), PackedAttention(None, engine.kernel)
    with pytest.raises(RuntimeError, match="got no layout"):
        engine.module(tokens, prefix_grouper=context)
    with pytest.raises(RuntimeError, match="does not implement seq_idx"):
        engine.module(tokens, prefix_grouper=context, seq_idx=tokens)


def test_gpus_and_faulty_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mamba2.machine_obstacles("cpu") == []
    assert mamba2.machine_obstacles("cuda") == ["Mamba2 layers have not run on a GPU with shared prefixes"]
    faults = {"falcon_h1": ("5.17.0", "no keywords"), "nemotron_h": ("5.15.0", "adds up the chunks")}
    for kind, (since, fault) in faults.items():
        config = transformers.AutoConfig.for_model(kind)
        monkeypatch.setattr(mamba2.transformers, "__version__", since)
        assert mamba2.obstacles(config) == []
        monkeypatch.setattr(mamba2.transformers, "__version__", "5.14.1")
        assert re.search(f"{fault}.*: pip install 'transformers>={since[:-2]}'", *mamba2.obstacles(config))
