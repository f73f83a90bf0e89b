"""Models that benchmarks build are as large as their names say, and their bound counts what a token visits."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from benchmarks.shapes import config_of

from verl_pg_plugin.architectures import skeleton
from verl_pg_plugin.planning.cost import ModelFlops


def test_the_bound_of_the_moe_shape_counts_the_three_billion_weights_that_a_token_visits() -> None:
    module = skeleton(config_of("qwen3-30b-a3b"))
    assert sum(weight.numel() for weight in module.parameters()) == pytest.approx(30.5e9, rel=0.01)
    flops = ModelFlops.of(module)
    assert (flops.per_token + flops.per_label) / 2 == pytest.approx(3.04e9, rel=0.02), "and no lookup table"
