"""The FLOPs behind ``mfu_physical`` are those of the rows that are computed."""

import numpy as np
import torch
import transformers

from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.layout import build_packed_layout


def model(model_type: str, **overrides: int) -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 4}
    config = transformers.AutoConfig.for_model(
        model_type, num_attention_heads=4, num_key_value_heads=2, **sizes, **overrides
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_counts_matrices_attention_pairs_and_head_rows_of_a_dense_model() -> None:
    flops = ModelFlops.of(model("qwen3"))
    per_layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24
    assert flops == ModelFlops(per_row=2 * 3 * per_layer, per_head_row=2 * 50 * 16, per_pair=4 * 4 * 4 * 3)

    tokens = np.array([1, 2, 3, 4, 1, 2, 3, 5, 6])
    layout = build_packed_layout(tokens, np.array([0, 4, 9]), np.array([3, 3]))
    rows, head_rows, pairs = 2 + 1 + 2, 1 + 2, 1 + 2 + 3 + 3 + 4
    assert flops.forward([layout]) == (rows * flops.per_row + head_rows * flops.per_head_row + pairs * flops.per_pair)


def test_experts_that_a_token_does_not_visit_do_no_work() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    flops = ModelFlops.of(model("qwen3_moe", **experts))
    attention, router, expert = 16 * 16 + 2 * 16 * 8 + 16 * 16, 16 * 8, 3 * 16 * 12
    assert flops.per_row == 2 * 3 * (attention + router + 2 * expert)
