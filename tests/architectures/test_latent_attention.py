"""Multi-head latent attention: values narrower than keys."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.architectures.tiny_configs import tiny_config
from tests.engine.carried_cases import ONE_GROUP, carrying_engine
from tests.engine.ranks import on_ranks
from tests.support import Result, actor_loss, assert_same, make_engine, run_engine, run_reference
from verl_pg_plugin.synthetic import make_batch

LATENT_TYPES = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"]


def save_latent_model(folder: Path, model_type: str) -> str:
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("model_type", LATENT_TYPES)
def test_narrow_values_are_exact_whole_and_in_chunks(tmp_path: Path, model_type: str) -> None:
    path = save_latent_model(tmp_path, model_type)
    batch = make_batch(ONE_GROUP, max_token_len_per_gpu=36)
    expected = run_reference(path, batch, actor_loss())
    assert_same(run_engine(carrying_engine(path), batch, actor_loss()), expected)
    whole = make_batch(ONE_GROUP)
    assert_same(run_engine(make_engine(path, packed=True), whole, actor_loss()), expected)


def run_on_rank(rank: int, path: str) -> Result:
    engine = make_engine(path, packed=True, engine={"ulysses_sequence_parallel_size": 2})
    return run_engine(engine, make_batch(ONE_GROUP, sp_size=2), actor_loss())


@pytest.mark.slow
def test_rows_spread_over_two_ranks(tmp_path: Path) -> None:
    path = save_latent_model(tmp_path, "deepseek_v3")
    expected = run_reference(path, make_batch(ONE_GROUP), actor_loss())
    for result in on_ranks(2, run_on_rank, path):
        assert_same(result, expected)
