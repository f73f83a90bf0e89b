"""Architectures on a GPU in bf16, their layers compiled: as close to float32 as stock rmpad is."""

import itertools
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.batches import make_batch
from make_models_table import read_record
from verl.utils import tensordict_utils as tu

from tests.architectures.test_every_model import ZERO_GRADIENTS, without
from tests.architectures.tiny_configs import MODEL_TYPES, tiny_config
from tests.attention.test_gpu import gpu_kernels
from tests.precision import BF16, SMOOTH_LOSS, assert_no_worse, errors, pooled
from tests.support import actor_loss, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.architectures import UNCOMPILED, WRONG_COMPILED

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("process_group")]

FLASH = {"attn_implementation": "flash_attention_2"}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "initializer_range": 0.05}
HEADS = {"num_attention_heads": 4, "head_dim": 64}
# A token visits all experts: rounding that sends it to other ones than float32 would be all that is seen.
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 4}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 64),
    **dict.fromkeys(("qk_rope_head_dim", "head_dim"), 32),
}
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "afmoe": {**HEADS, **EXPERTS, "num_experts": 4, "num_dense_layers": 1},
    "cohere2_moe": {**HEADS, **EXPERTS, "num_experts": 4},
    "deepseek_v2": {**LATENT, **ROUTED, **EXPERTS},
    "deepseek_v3": {**LATENT, **ROUTED, **EXPERTS},
    "dots1": {**HEADS, **EXPERTS, **ROUTED, "n_shared_experts": 1},
    "exaone_moe": {**HEADS, **EXPERTS, **WINDOWS, "num_experts": 4, "n_group": 1, "topk_group": 1},
    "glm4_moe": {**HEADS, **EXPERTS, **ROUTED},
    "glm4_moe_lite": {**LATENT, **ROUTED, **EXPERTS},
    "hy_v3": {**HEADS, **EXPERTS, "num_experts": 4},
    "laguna": {**HEADS, **EXPERTS, **WINDOWS, "num_experts": 4, "num_attention_heads_per_layer": [4, 4, 4]},
    "mellum": {**HEADS, **EXPERTS, **WINDOWS, "num_experts": 4},
    "mixtral": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 4},
    "olmoe": {**HEADS, "num_experts": 4, "num_experts_per_tok": 4},
    "qwen2_moe": {**HEADS, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {**HEADS, **EXPERTS, "num_experts": 4},
}
EXACT_TYPES = {name for record in read_record().values() for name in record if record[name]["status"] == "exact"}
DENSE = sorted((EXACT_TYPES & set(MODEL_TYPES)) - UNCOMPILED.keys() - WRONG_COMPILED.keys() - MODELS.keys())
OF_TYPE = {
    "gemma4_text": {"global_head_dim": 64, "initializer_range": 0.02},
    "granite": {"attention_multiplier": 1 / 8},
    "youtu": {**LATENT, "qk_head_dim": 96},
}
UNSCALED = {"gemma4_text": "q_norm.weight"}
"""Weights that stand for the scale of scores, which is 1: without it rounding alone moves gradients by a quarter."""
STOCK_ATTENTION = {"ministral3": "sdpa"}
"""Where stock rmpad is wrong on flash-attn: positions do not reach it, and rows see those packed before them."""
SHAPES = (300, [60, 33, 90, 5, 71, 64]), (150, [100, 40, 77]), (90, [64])
"""Lengths of prompts and responses."""


def save_dense(folder: Path, model_type: str) -> str:
    """Two layers, of both kinds where a type has two, with windows shorter than the prompts."""
    torch.manual_seed(0)
    sizes = {**SIZES, **HEADS, "num_hidden_layers": 2, "sliding_window": 64, **OF_TYPE.get(model_type, {})}
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(model_type, **sizes), dtype=torch.float32)
    for name, weight in model.named_parameters():
        if model_type in UNSCALED and name.endswith(UNSCALED[model_type]):
            torch.nn.init.constant_(weight, HEADS["head_dim"] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)


def assert_as_close_as_stock(
    path: str, kernel: str, compiled: bool = False, zero: Set[str] = frozenset(), beside: str = "rmpad", **more: Any
) -> None:
    """Outputs and gradients, but those of ``zero``, of which float32 has nothing but rounding.

    ``beside`` stock's "rmpad" or "padded" mode, or ours "uncompiled".
    """
    model = {"override_config": {**FLASH, **more}}
    drawn, loss = [], actor_loss(**SMOOTH_LOSS)
    for seed in (0, 10, 20):
        samples = [sample for place, shape in enumerate(SHAPES, seed) for sample in group(*shape, place)]
        drawn.append(make_batch(samples, max_token_len_per_gpu=1200))
        tu.assign_non_tensor(drawn[-1], use_remove_padding=beside != "padded")  # which ours does not read
    references = [without(run_reference(path, batch, loss), zero) for batch in drawn]
    ours = {**BF16, "attention_kernel": kernel, "compile_layers": compiled}
    if beside == "uncompiled":
        other = make_engine(path, engine={**ours, "compile_layers": False}, model=model)
    else:
        other = make_engine(path, packed=False, engine=BF16, model={**model, "use_remove_padding": beside == "rmpad"})
    found = [
        pooled([errors(run_engine(engine, batch, loss), want) for batch, want in zip(drawn, references, strict=True)])
        for engine in (make_engine(path, engine=ours, model=model), other)
    ]
    assert_no_worse(*found)


@gpu_kernels("flash_attn_4", "flash_attn_2", "torch_varlen")
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite"])
def test_values_narrower_than_keys_are_as_exact_as_stock_rmpad(tmp_path: Path, model_type: str, name: str) -> None:
    assert_as_close_as_stock(save_tiny_model(tmp_path, model_type, **SIZES, **MODELS[model_type]), name)


@gpu_kernels("flash_attn_4", "flash_attn_2")
@pytest.mark.parametrize("compiled", [False, True])
def test_learned_sinks_are_as_exact_as_stock_in_eager_mode(tmp_path: Path, name: str, compiled: bool) -> None:
    """Windows shorter than prompts, and four experts that a token visits all; stock's rmpad mode is wrong there.

    Grouped products sum gradients of experts' biases in bf16, more of them at once than stock verl: beside uncompiled.
    """
    sizes = {**SIZES, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 64}
    eager = {"attn_implementation": "eager", "_experts_implementation": "grouped_mm" if compiled else "eager"}
    path = save_tiny_model(tmp_path, "gpt_oss", **sizes)
    biases = {f"model.layers.{layer}.mlp.experts.gate_up_proj_bias" for layer in range(3)} if compiled else set()
    assert_as_close_as_stock(path, name, compiled, biases, "padded", **eager)
    if compiled:
        assert_as_close_as_stock(path, name, compiled, beside="uncompiled", **eager)


COMPILED_EXPERTS = [(name, "grouped_mm", True) for name in sorted(MODELS.keys() & set(MODEL_TYPES))]


@pytest.mark.parametrize(
    ("model_type", "experts", "compiled"),
    [*itertools.product(("qwen3_moe", "mixtral"), ("eager", "grouped_mm"), (False,)), *COMPILED_EXPERTS],
)
def test_experts_are_as_exact_as_stock_rmpad(tmp_path: Path, model_type: str, experts: str, compiled: bool) -> None:
    """Compiled with the grouped products that a GPU runs by default; on a CPU they are loops that do not compile."""
    path = save_tiny_model(tmp_path, model_type, **SIZES, **MODELS[model_type])
    assert_as_close_as_stock(path, "auto", compiled=compiled, _experts_implementation=experts)


@pytest.mark.parametrize("model_type", DENSE)
def test_compiled_dense_types_are_as_exact_as_stock_rmpad(tmp_path: Path, model_type: str) -> None:
    """All that ``compile_layers=auto`` compiles; ``test_compiled_layers.py`` does the same on a CPU."""
    path, zero = save_dense(tmp_path, model_type), ZERO_GRADIENTS.get(model_type, set())
    attention = STOCK_ATTENTION.get(model_type, "flash_attention_2")
    assert_as_close_as_stock(path, "auto", compiled=True, zero=zero, attn_implementation=attention)
