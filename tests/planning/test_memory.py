"""What cached tokens take of a budget follows from the sizes of the model."""

import pytest
import transformers

from verl_pg_plugin.planning.memory import TokenMemory

CONFIG_8B = transformers.Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)


def memory(keeps_attention: bool = True, checkpointing: bool = True) -> TokenMemory:
    return TokenMemory.of(CONFIG_8B, 2, checkpointing, keeps_attention)


def test_an_8b_config_takes_580_kib_a_token_and_432_kib_a_cached_one() -> None:
    assert memory().activations / 1024 == 36 * (8 + 8 + 0.125)
    assert (memory().key_value / 1024, memory().sums / 1024) == (144, 288)
    weights = memory().weights(forward_only=False)
    assert weights.cached == pytest.approx(0.745, abs=0.002)
    assert weights.published == pytest.approx(0.497, abs=0.002)
    assert weights.recomputing == pytest.approx(8 / 16.125), "the layer's input alone"
    assert memory(keeps_attention=False).weights(forward_only=False).recomputing == 1
    log_probs = memory().weights(forward_only=True)  # without sums of gradients
    assert log_probs.cached == log_probs.published == pytest.approx(144 / 580.5, abs=0.001)


def test_tokens_that_keep_less_make_cached_ones_dearer_and_those_that_keep_all_cheaper() -> None:
    cached = [
        memory(keeps, checkpointing).weights(forward_only=False).cached
        for keeps, checkpointing in ((False, True), (True, True), (True, False))
    ]
    assert cached[0] == pytest.approx(1.5)
    assert cached == sorted(cached, reverse=True)


def test_latent_attention_caches_its_wide_keys_and_narrow_values() -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    assert TokenMemory.of(config, 2, True, True).key_value == 2 * 4 * (24 + 16) * 2


def test_a_config_without_sizes_counts_cached_tokens_as_the_most_there_is() -> None:
    weights = TokenMemory.of(transformers.PretrainedConfig(), 2, True, True).weights(forward_only=False)
    assert (weights.cached, weights.published) == (3, 2)
