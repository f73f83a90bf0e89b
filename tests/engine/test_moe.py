"""Mixtures of experts: shared tokens visit their experts once, and every number stays that of the sequence alone."""

from pathlib import Path

import pytest

from tests.support import check_exact, group, make_engine, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

MODELS: dict[str, dict] = {
    "qwen3_moe": {
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Two ways to write experts; tests/architectures has every type."""
FUSED = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("model_type", MODELS)
def test_every_implementation_of_experts_is_exact(tmp_path: Path, model_type: str, experts: str) -> None:
    path = save_tiny_model(tmp_path, model_type, **MODELS[model_type])
    override = {"attn_implementation": "sdpa", "_experts_implementation": experts}
    engine = make_engine(path, packed=True, model={"override_config": override})
    assert engine.module.config._experts_implementation == experts
    samples = [*group(14, [5, 3, 8, 2], 1), *group(9, [4, 4], 2)]
    check_exact(engine, path, make_batch(samples, max_token_len_per_gpu=40))


@pytest.mark.parametrize("model_type", MODELS)
def test_fused_kernels_take_the_place_of_the_head_and_router_logits_change_nothing(
    tmp_path: Path, model_type: str
) -> None:
    """verl's FSDP engine reads logits alone: the load-balancing loss of the model's output goes nowhere."""
    path = save_tiny_model(tmp_path, model_type, **MODELS[model_type])
    override = {"attn_implementation": "sdpa", "output_router_logits": True}
    for model in (FUSED, {"override_config": override}):
        engine = make_engine(path, packed=True, model=model)
        assert bool(engine.log_prob_head and engine.log_prob_head.fused) == (model is FUSED)
        check_exact(engine, path, make_batch(group(14, [5, 3, 8, 2], 1)))
