"""Models with Gated DeltaNet layers through the engine match every sequence alone, in float64.

In float32 the gradients of ``A_log`` and ``dt_bias``, sums of large terms that nearly cancel, are less exact.
"""

import gc
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.batches import make_batch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.engine.carried_cases import CASES
from tests.engine.ranks import check_exact_on_ranks
from tests.layout.tries import Batch, batches
from tests.mixers.hybrids import KINDS, SAMPLES, samples_of, save_hybrid, stretched, trie_of_depth
from tests.precision import in_float64
from tests.support import check_exact, infer, make_engine
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.engine.verify import MismatchError
from verl_pg_plugin.mixers import recurrence
from verl_pg_plugin.mixers.convolution import Windows, convolve, plain_convolution
from verl_pg_plugin.mixers.delta_layer import CONVOLUTION

COMPILES = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", autouse=True)
def float64() -> Iterator[None]:
    with in_float64():
        yield


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: save_hybrid(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def padding(hybrids: dict[str, str]) -> Any:
    return make_engine(hybrids["qwen3_5_text"], engine={"pad_to_length": True, "pad_to_length_bucket": 16})


@pytest.mark.parametrize("kind", KINDS)
def test_hybrids_match_single_sequences(kind: str, hybrids: dict) -> None:
    engine = make_engine(hybrids[kind])
    for samples in (SAMPLES, samples_of(trie_of_depth(4))):
        check_exact(engine, hybrids[kind], make_batch(samples))
    assert engine.shared_model.layers == {"gated_delta": 2, "attention": 1}


@settings(max_examples=10)
@given(batches(max_sequences=6), st.sampled_from([1, 1, 5, 40]))
def test_random_tries_with_padding_are_exact(padding: Any, hybrids: dict, batch: Batch, times: int) -> None:
    answered = (len(s) for s, prompt in zip(batch.sequences, batch.prompt_lengths, strict=True) if len(s) > prompt)
    assume(max(answered) * times > 2)  # else the gradient of keys is zero, and rounding infinite
    check_exact(padding, hybrids["qwen3_5_text"], make_batch(samples_of(stretched(batch, times))))


SPLIT = {  # the kinds differ in their projections
    "qwen3_5_text": [
        "small_groups_next_to_large_ones",
        "turns_of_two_sessions_that_part",
        "equal_and_nested_responses",
    ],
    "qwen3_next": ["groups_with_a_chat_template", "a_prompt_that_nearly_fills_the_budget"],
}


def forwards_in_memory() -> set[int]:
    gc.collect()
    return {id(context) for context in gc.get_objects() if isinstance(context, PackedAttention)}


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in SPLIT.items() for case in cases])
def test_split_groups_are_exact(kind: str, case: str, hybrids: dict) -> None:
    samples, budget = CASES[case]
    engine, before = make_engine(hybrids[kind], splits=True), forwards_in_memory()
    check_exact(engine, hybrids[kind], make_batch(samples, max_token_len_per_gpu=budget), splits=True)
    assert forwards_in_memory() <= before, "cached tokens outlive the update"


OPTIONS: dict[str, dict] = {
    "attention recomputed, verified": {"engine": {"activations": "inputs", "verify": "every_1"}},
    "nothing checkpointed": {"model": {"enable_gradient_checkpointing": False}},
    "compiled": {"engine": {"compile_layers": True}},
}


@pytest.mark.parametrize("option", [*list(OPTIONS)[:-1], pytest.param("compiled", marks=COMPILES)])
def test_options_are_exact_for_whole_and_split_groups(option: str, hybrids: dict) -> None:
    engine = make_engine(hybrids["qwen3_5_text"], splits=True, **OPTIONS[option])
    check_exact(engine, hybrids["qwen3_5_text"], make_batch(SAMPLES, max_token_len_per_gpu=150), splits=True)


def test_chunks_without_a_cache_compute_their_prompts(hybrids: dict) -> None:
    engine = make_engine(hybrids["qwen3_5_text"], engine={"prefix_cache": "off"})
    got = check_exact(engine, hybrids["qwen3_5_text"], make_batch(SAMPLES, max_token_len_per_gpu=150))
    assert got.metrics["prefix_grouper/split_groups"] == [0.0]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_two_ranks_are_exact(kind: str, hybrids: dict) -> None:
    """Tokens spread over the ranks, in whole groups and in a split one; and sequences of each rank."""
    spread = {"splits": True, "engine": {"ulysses_sequence_parallel_size": 2}}
    check_exact_on_ranks(hybrids[kind], partial(make_batch, SAMPLES, max_token_len_per_gpu=75), float64=True, **spread)
    check_exact_on_ranks(hybrids[kind], partial(make_batch, SAMPLES), [[0, 1, 4, 6, 8], [2, 3, 5, 7]], float64=True)


def test_lost_states_missing_layouts_and_replaced_convolutions_are_errors(hybrids: dict, monkeypatch) -> None:
    def forget(state: torch.Tensor, num_children: torch.Tensor, total: int) -> torch.Tensor:
        return state.new_zeros(total, *state.shape[1:])

    engine = make_engine(hybrids["qwen3_next"], engine={"verify": "first"})
    with patch.object(recurrence._RepeatState, "apply", forget), pytest.raises(MismatchError, match="shared prefixes"):
        infer(engine, make_batch(SAMPLES))
    engine = make_engine(hybrids["qwen3_next"])
    with pytest.raises(RuntimeError, match="got no layout"):
        engine.module(torch.ones(1, 4, dtype=torch.int64), prefix_grouper=PackedAttention(None, engine.kernel))
    layers = [module for module in engine.module.modules() if hasattr(module, "conv1d")]
    # Since transformers 5.15 layers call a function of their file.
    monkeypatch.setattr(sys.modules[type(layers[0]).__module__], CONVOLUTION, lambda x, *_, **__: x)
    for layer in layers:
        if hasattr(layer, CONVOLUTION):
            setattr(layer, CONVOLUTION, None)  # transformers then calls the module's own convolution
    with pytest.raises(RuntimeError, match="did not call causal_conv1d_fn"):
        infer(engine, make_batch(SAMPLES))


def test_gradient_of_a_projection_is_contiguous_per_token() -> None:
    """GPU matrix products over rows of an odd number of tokens take six times as long."""
    layout = trie_of_depth(2).layout()
    x = torch.randn(1, layout.num_tokens, 8, requires_grad=True)
    projected = 2 * x
    projected.register_hook(lambda grad: strides.append(grad.stride()[1:]))
    strides: list[tuple[int, ...]] = []
    windows, weight = Windows.from_layout(layout, 4, x.device), torch.randn(8, 4)
    convolve(projected.transpose(1, 2), windows, partial(plain_convolution, weight=weight)).sum().backward()
    assert strides == [(8, 1)]
