"""Cost of tokens, images and attention pairs, as metrics, balancing and ``estimate`` use it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests import own_models
from tests.architectures.tiny_configs import tiny_config
from tests.layout.tries import batch_of
from tests.mixers import hybrids
from tests.modalities.tiny_vision import config_of as vision_config
from verl_pg_plugin.mixers import PairCost
from verl_pg_plugin.planning.cost import ModelFlops, visible_pairs
from verl_pg_plugin.skeleton import text_skeleton

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 4}
PER_LAYER = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24
LAYOUT = batch_of(((1, 2, 3), (4,)), ((1, 2, 3), (5, 6))).layout()


def config(model_type: str, **overrides: object) -> transformers.PretrainedConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.AutoConfig.for_model(model_type, **{**SIZES, **heads, **overrides})


def test_dense_models_cost_matrices_pairs_and_head_rows() -> None:
    flops = ModelFlops.of(text_skeleton(config("qwen3")))
    assert flops == ModelFlops.of(transformers.AutoModelForCausalLM.from_config(config("qwen3")))
    pairs = (PairCost(4 * 4 * 4 * 3),)
    assert flops == ModelFlops(per_token=2 * 3 * PER_LAYER, per_label=2 * 50 * 16, pairs=pairs)

    tokens, labels, seen = 2 + 1 + 2, 1 + 2, 1 + 2 + 3 + 3 + 4
    priced = tokens * flops.per_token + labels * flops.per_label + seen * pairs[0].flops
    assert flops.forward([LAYOUT]) == priced
    segments = flops.segments(np.array([0, 2, 2]), np.array([2, 1, 2]), np.array([0, 1, 2]))
    assert segments.sum() == priced, "balancing and micro-batches use one price"
    # A flash-attn config is priced without the package and stays unchanged.
    flash = config("qwen3")
    flash._attn_implementation = "flash_attention_2"
    assert ModelFlops.of(text_skeleton(flash)) == ModelFlops.of(text_skeleton(config("qwen3")))
    assert flash._attn_implementation == "flash_attention_2"


def test_recurrent_layers_cost_weights_and_state_but_no_pairs() -> None:
    flops = ModelFlops.of(text_skeleton(hybrids.config_of("qwen3_5_text", linear_value_head_dim=4)))
    assert flops.pairs == (PairCost(4 * 4 * 8),)
    keys, values = 2 * 8, 4 * 4
    attention = 32 * 2 * 32 + 2 * 32 * 16 + 32 * 32  # queries and their gate, keys and values, output
    recurrent = 32 * (2 * keys + 2 * values + 2 * 4) + 4 * (2 * keys + values) + values * 32
    weights = attention + 2 * recurrent + 3 * 3 * 32 * 48
    assert flops.per_token == 2 * weights + 2 * 6 * 4 * 8 * 4


def test_only_visited_experts_cost_flops_and_unknown_numbers_are_refused() -> None:
    moe = config("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12)
    mixtral = config("mixtral", num_local_experts=8, num_experts_per_tok=2, intermediate_size=12)
    attention, router, expert = 16 * 16 + 2 * 16 * 8 + 16 * 16, 16 * 8, 3 * 16 * 12
    for of_experts in (moe, mixtral):
        flops = ModelFlops.of(text_skeleton(of_experts))
        assert flops.per_token == 2 * 3 * (attention + router + 2 * expert)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(moe)
    module.config = config("qwen3")  # like a config with other names for these numbers
    with pytest.raises(ValueError, match=r"override_config\.num_experts_per_tok=<experts a token visits>"):
        ModelFlops.of(module)


def of_class(model_class: type[own_models.OwnForCausalLM]) -> ModelFlops:
    return ModelFlops.or_tokens(lambda: text_skeleton(own_models.register_own(model_class)))


def test_classes_of_users_are_priced_or_cost_their_tokens() -> None:
    plain = of_class(own_models.OwnForCausalLM)
    assert not plain.unknown
    assert of_class(own_models.LinspaceForCausalLM) == plain, "reads numbers when it is built"
    for model_class, why in (
        (own_models.WeightReadForCausalLM, "RuntimeError: Tensor.item() cannot be called on meta"),
        (own_models.UnnamedExpertsForCausalLM, "ValueError: own_of_tests has experts, and its"),
    ):
        flops = of_class(model_class)
        assert flops.unknown.startswith(f"cannot be counted ({why}")
        assert flops.forward([LAYOUT]) == LAYOUT.num_tokens
        assert flops.alone(np.array([3, 4])).tolist() == [3, 4]


def test_a_negative_window_counts_tokens() -> None:
    negative = config("mistral", sliding_window=-1)
    flops = ModelFlops.or_tokens(lambda: text_skeleton(negative))
    assert flops.unknown == "cannot be counted (ValueError: attention windows are [-1])"


def test_window_layers_pay_for_visible_keys() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    flops = ModelFlops.of(text_skeleton(config("gemma2", layer_types=kinds, sliding_window=2)))
    assert flops.pairs == (PairCost(4 * 4 * 4), PairCost(2 * 4 * 4 * 4, window=2))
    full, seen = 1 + 2 + 3 + 3 + 4, 1 + 2 + 2 + 2 + 2
    assert flops.without_head(LAYOUT) - 5 * flops.per_token == 64 * full + 128 * seen


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "phi3", "qwen2", "qwen3_moe"])
def test_windows_without_layer_types_count_in_every_layer_if_enabled(model_type: str) -> None:
    switched_off = {"use_sliding_window": False} if model_type.startswith("qwen") else {}
    for window in (7, None):
        windowed = config(model_type, sliding_window=window, pad_token_id=0, **switched_off)
        pairs = ModelFlops.of(text_skeleton(windowed)).pairs
        assert [pair.window for pair in pairs] == [None if switched_off else window]


def test_lookup_tables_cost_nothing_and_heads_their_sizes() -> None:
    with torch.device("meta"):
        value = transformers.AutoModelForTokenClassification.from_config(config("qwen3", num_labels=1))
    flops = ModelFlops.of(value)
    assert flops.per_token == 2 * 3 * PER_LAYER
    assert flops.per_label == 2 * (16 + 1)
    assert ModelFlops.of(text_skeleton(tiny_config("deepseek_v3"))).pairs == (PairCost(2 * (24 + 12) * 4 * 2),)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1), st.none() | st.integers(1, 12))
def test_segments_pay_for_the_keys_in_each_querys_window(segments, window) -> None:
    counted = [sum(min(p + 1, window or p + 1) for p in range(a, a + n)) for a, n in segments]
    assert visible_pairs(*np.array(segments).T, window).tolist() == counted


GRIDS = ((1, 8, 12), (1, 4, 8))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_patches_cost_what_torch_counts(kind: str) -> None:
    config = vision_config(kind)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(config)
    pixels = torch.randn(sum(int(np.prod(grid)) for grid in GRIDS), 3 * 2 * 4 * 4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model.visual(pixels, grid_thw=torch.tensor(GRIDS))
    patches = np.array([np.prod(grid) for grid in GRIDS])
    flops, of_text = ModelFlops.of(model), ModelFlops.of(text_skeleton(config))  # of Qwen3.5's text alone
    assert flops.images(patches) == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert replace(flops, vision=None) == replace(of_text, vision=None), "the encoder does not change the text's price"
