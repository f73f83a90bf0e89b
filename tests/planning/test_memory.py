"""What cached tokens take of a budget follows from the sizes of the model."""

from dataclasses import replace

import pytest
import transformers

from tests.architectures.tiny_configs import tiny_config
from tests.planning.configs import CONFIGS
from verl_pg_plugin.planning.activation_level import Level, Levels
from verl_pg_plugin.planning.memory import TokenBytes, cache_weights

SIZES = TokenBytes.of(CONFIGS["8b"])


def test_an_8b_config_takes_580_kib_a_token_and_432_kib_a_cached_one() -> None:
    assert SIZES.held(Level.ATTENTION) == SIZES.held(Level.ATTENTION_ON_HOST) == 36 * 1024 * (8 + 8 + 0.125)
    assert (SIZES.beside(1, 0), SIZES.beside(0, 1)) == ((144 + 288) * 1024, 288 * 1024)
    weights = cache_weights(Levels(sizes=SIZES), forward_only=False)
    assert weights.cached == pytest.approx(0.745, abs=0.002)
    assert weights.published == pytest.approx(0.497, abs=0.002)
    assert weights.recomputing == pytest.approx(8 / 16.125), "the layer's input alone"
    asked = cache_weights(Levels(Level.ATTENTION, SIZES), forward_only=False)
    assert asked == replace(weights, recomputing=1.0), "no other level is taken than the one that is asked for"


def test_log_probs_cache_no_sums() -> None:
    weights = cache_weights(Levels(sizes=SIZES), forward_only=True)
    assert weights.cached == weights.published == pytest.approx(144 / 580.5, abs=0.001)


def test_tokens_that_keep_less_make_cached_ones_dearer_and_those_that_keep_all_cheaper() -> None:
    levels = (Level.ATTENTION_ON_HOST, Level.INPUTS, Level.ATTENTION, Level.ALL)
    cached = [cache_weights(Levels(level, SIZES), forward_only=False).cached for level in levels]
    assert cached[:2] == [pytest.approx(1.5)] * 2
    assert cached == sorted(cached, reverse=True)


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    # all, attention, attention_on_host, inputs, inputs_on_host, stock verl
    [("4b", (3_900, 627, 171, 328, 154, 514)), ("8b", (4_950, 773, 211, 473, 195, 640))],
)
def test_levels_take_what_was_measured(name: str, kilobytes: tuple[int, ...]) -> None:
    sizes = TokenBytes.of(CONFIGS[name])
    found = [*(sizes.on_device(level) for level in Level), sizes.stock()]
    expected = [
        pytest.approx(1000 * kilobytes[0], rel=0.05),
        *(pytest.approx(1000 * x, rel=0.01) for x in kilobytes[1:]),
    ]
    assert found == expected


def test_latent_attention_caches_narrow_values_as_wide_as_its_keys() -> None:
    assert TokenBytes.of(tiny_config("deepseek_v3")).key_value == 4 * (24 + 24) * 2


def test_a_config_without_sizes_counts_cached_tokens_as_the_most_there_is() -> None:
    assert TokenBytes.of(transformers.PretrainedConfig()) is None
    weights = cache_weights(Levels(), forward_only=False)
    assert (weights.cached, weights.published) == (3, 2)
