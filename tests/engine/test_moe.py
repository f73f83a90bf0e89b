"""Mixtures of experts: shared rows visit their experts once, and every number stays that of the row alone."""

from pathlib import Path

import pytest

from tests.engine.carried_cases import ONE_GROUP, carrying_engine
from tests.support import actor_loss, assert_same, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MODELS: dict[str, dict] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_experts_are_exact_through_the_engine(tmp_path: Path, model_type: str) -> None:
    path = save_tiny_model(tmp_path, model_type, **MODELS[model_type])
    batch = make_batch([*group(14, [5, 3, 8, 2], 1), *group(9, [4, 4], 2)], max_token_len_per_gpu=40)
    assert_same(
        run_engine(make_engine(path, packed=True), batch, actor_loss()), run_reference(path, batch, actor_loss())
    )


def test_experts_of_carried_rows_are_visited_again_without_gradient_only(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3_moe", **MODELS["qwen3_moe"])
    batch = make_batch(ONE_GROUP, max_token_len_per_gpu=36)
    assert_same(run_engine(carrying_engine(path), batch, actor_loss()), run_reference(path, batch, actor_loss()))
