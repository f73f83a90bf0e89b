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
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
VARIANTS: dict[str, dict] = {
    **{name: {"override_config": {"_experts_implementation": name}} for name in IMPLEMENTATIONS},
    "router logits": {"override_config": {"output_router_logits": True}},
    "fused kernels": {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_type", MODELS)
def test_every_way_to_run_experts_is_exact(tmp_path: Path, model_type: str, variant: str) -> None:
    """verl's FSDP engine reads logits alone: the load-balancing loss of the model's output goes nowhere."""
    path = save_tiny_model(tmp_path, model_type, **MODELS[model_type])
    engine = make_engine(path, model=VARIANTS[variant])
    if variant in IMPLEMENTATIONS:
        assert engine.module.config._experts_implementation == variant
    assert bool(engine.log_prob_head and engine.log_prob_head.fused) == (variant == "fused kernels")
    samples = [*group(14, [5, 3, 8, 2], 1), *group(9, [4, 4], 2)]
    check_exact(engine, path, make_batch(samples, max_token_len_per_gpu=40))
