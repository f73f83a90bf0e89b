"""Split groups in models whose layers or heads read cached tokens otherwise."""

from pathlib import Path

import pytest

from tests.engine.carried_cases import MIXED, ONE_GROUP, carry_always, carrying, carrying_engine
from tests.engine.test_moe import MODELS as EXPERTS
from tests.engine.value_models import check_exact_values, critic_batch, make_value_engine, save_value_model
from tests.support import check_exact, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3}


MODELS = {
    "windows": ("qwen3", WINDOW, MIXED, 56),
    "experts": ("qwen3_moe", EXPERTS["qwen3_moe"], ONE_GROUP, 36),
}


@pytest.mark.parametrize("layers", MODELS)
def test_layers_read_cached_tokens_as_their_own(tmp_path: Path, layers: str) -> None:
    model_type, sizes, samples, budget = MODELS[layers]
    path = save_tiny_model(tmp_path, model_type, **sizes)
    engine = carrying_engine(path)
    with carrying(engine):
        check_exact(engine, path, make_batch(samples, max_token_len_per_gpu=budget))


def test_values_of_cached_tokens_reach_the_critic(tmp_path: Path) -> None:
    path = save_value_model(tmp_path)
    engine = make_value_engine(path)
    carry_always(engine)
    with carrying(engine):
        check_exact_values(engine, path, critic_batch(MIXED, max_token_len_per_gpu=56))
