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


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_every_implementation_of_experts_is_exact(tmp_path: Path, model_type: str, experts: str) -> None:
    path = save_tiny_model(tmp_path, model_type, **MODELS[model_type])
    batch = make_batch([*group(14, [5, 3, 8, 2], 1), *group(9, [4, 4], 2)], max_token_len_per_gpu=40)
    override = {"attn_implementation": "sdpa", "_experts_implementation": experts}
    engine = make_engine(path, packed=True, model={"override_config": override})
    assert engine.module.config._experts_implementation == experts
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(path, batch, actor_loss()))


def test_router_logits_that_are_asked_for_change_nothing(tmp_path: Path) -> None:
    """verl's FSDP engine reads logits alone: the load-balancing loss of the model's output goes nowhere."""
    path = save_tiny_model(tmp_path, "qwen3_moe", **MODELS["qwen3_moe"])
    batch = make_batch(group(14, [5, 3, 8, 2], 1))
    override = {"attn_implementation": "sdpa", "output_router_logits": True}
    engine = make_engine(path, packed=True, model={"override_config": override})
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(path, batch, actor_loss()))


@pytest.mark.parametrize("model_type", MODELS)
def test_fused_kernels_take_the_place_of_the_head(tmp_path: Path, model_type: str) -> None:
    path = save_tiny_model(tmp_path, model_type, **MODELS[model_type])
    batch = make_batch(group(14, [5, 3, 8, 2], 1))
    fused = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
    engine = make_engine(path, packed=True, model=fused)
    assert engine.log_prob_head.fused is not None
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(path, batch, actor_loss()))


def test_experts_of_carried_rows_are_visited_again_without_gradient_only(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3_moe", **MODELS["qwen3_moe"])
    batch = make_batch(ONE_GROUP, max_token_len_per_gpu=36)
    assert_same(run_engine(carrying_engine(path), batch, actor_loss()), run_reference(path, batch, actor_loss()))
