"""Architectures on a GPU in bf16, their layers compiled: as close to float32 as stock rmpad is."""

from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.batches import make_batch
from verl.utils import tensordict_utils as tu

from tests.architectures.outcome import model_class, outcome_of
from tests.architectures.test_every_model import ZERO_GRADIENTS, without
from tests.architectures.tiny_configs import MODEL_TYPES, sizes_of, tiny_config
from tests.attention.test_gpu import gpu_kernels
from tests.precision import BF16, SMOOTH_LOSS, assert_no_worse, errors, pooled
from tests.support import actor_loss, group, make_engine, run_engine, run_reference
from verl_pg_plugin.gradient_checkpointing import FLOAT32_ANGLE_TYPES, FSDP2_CASTS_AGAIN

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("process_group")]

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.05,
    "sliding_window": 64,
    # Tokens visit all experts: otherwise rounding that changes their choice would dominate the error.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
}
LATENT = {
    "num_key_value_heads": 4,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 64),
    **dict.fromkeys(("qk_rope_head_dim", "head_dim"), 32),
    "qk_head_dim": 96,
}
OF_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "sarvam_mla", "youtu"), LATENT),
    "fuyu": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4},
    **{name: {"global_head_dim": 64, "initializer_range": 0.02} for name in ("gemma4_text", "gemma4_unified_text")},
    "granite": {"attention_multiplier": 1 / 8},
    "hrm_text": {"prefix_lm": False},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "minimax_m2": {"initializer_range": 0.02},
    "opt": {"ffn_dim": 512},
}
COMPILED = [name for name in MODEL_TYPES if outcome_of(name).compiled]
# Compared with uncompiled layers: stock verl cannot build them, or (gpt-oss) its sdpa attends across sequences.
NOT_IN_STOCK = {"codegen", "fuyu", "gpt_neox", "gpt_oss", "gptj", "hrm_text", "opt", "persimmon"}
CAPPED = {"gemma2", "vaultgemma"}  # softcap, which builds of flash-attn may lack
STOCK_ATTENTION = {  # where stock rmpad on flash-attn is inexact or missing
    **dict.fromkeys(
        ("cohere_compass_text", "gpt_bigcode", "gpt_oss", "minimax_m3_vl_text", "ministral3", "moshi"), "sdpa"
    ),
    **dict.fromkeys((*CAPPED, "codegen", "flint", "gptj"), "eager"),
}
SHAPES = (300, [60, 33, 90, 5, 71, 64]), (150, [100, 40, 77]), (90, [64])  # lengths of prompts and responses


def save_two_layers(folder: Path, model_type: str) -> str:
    """Save a model with a layer of each kind, and windows shorter than the prompts."""
    torch.manual_seed(0)
    sizes = sizes_of(transformers.AutoConfig.for_model(model_type), SIZES) | OF_TYPE.get(model_type, {})
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(model_type, **sizes), dtype=torch.float32)
    for name, weight in model.named_parameters():
        # Its scores are not scaled: without this, rounding alone moves gradients by a quarter.
        if model_type.startswith("gemma4") and name.endswith("q_norm.weight"):
            torch.nn.init.constant_(weight, SIZES["head_dim"] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)


def assert_as_close_as_stock(
    path: str, kernel: str, compiled: bool = False, zero: Set[str] = frozenset(), baseline: str = "rmpad", **more: Any
) -> None:
    """Compare outputs and gradients with a baseline: stock "rmpad" or "padded", or ours "uncompiled".

    Gradients named in ``zero`` are zero but for rounding, and are left out.
    """
    model = {"override_config": {"attn_implementation": "flash_attention_2", **more}}
    drawn, loss = [], actor_loss(**SMOOTH_LOSS)
    for seed in (0, 10, 20):
        samples = [sample for place, shape in enumerate(SHAPES, seed) for sample in group(*shape, place)]
        drawn.append(make_batch(samples, max_token_len_per_gpu=1200))
        tu.assign_non_tensor(drawn[-1], use_remove_padding=baseline != "padded")  # packed mode ignores it
    references = [without(run_reference(path, batch, loss), zero) for batch in drawn]
    ours = {**BF16, "attention_kernel": kernel, "compile_layers": compiled}
    fsdp2 = FSDP2_CASTS_AGAIN or transformers.AutoConfig.from_pretrained(path).model_type not in FLOAT32_ANGLE_TYPES
    make = partial(make_engine, path, strategy="fsdp2" if fsdp2 else "fsdp")
    if baseline == "uncompiled":
        other = make(engine={**ours, "compile_layers": False}, model=model)
    else:
        other = make(packed=False, engine=BF16, model={**model, "use_remove_padding": baseline == "rmpad"})
    measured = [
        pooled([errors(run_engine(engine, batch, loss), want) for batch, want in zip(drawn, references, strict=True)])
        for engine in (make(engine=ours, model=model), other)
    ]
    assert_no_worse(*measured)


def assert_compiled_as_close(folder: Path, model_type: str, attention: str) -> None:
    """Compare compiled layers, with the grouped expert products that a GPU runs by default."""
    more = {"attn_implementation": attention}
    if model_class(tiny_config(model_type))._can_set_experts_implementation():
        more["_experts_implementation"] = "grouped_mm"
    zero = ZERO_GRADIENTS.get(model_type, set())
    baseline = "uncompiled" if model_type in NOT_IN_STOCK else "rmpad"
    kernel = "sdpa" if model_type in CAPPED else "auto"
    assert_as_close_as_stock(save_two_layers(folder, model_type), kernel, True, zero, baseline, **more)


@gpu_kernels("flash_attn_4", "flash_attn_2", "torch_varlen")
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite"])
def test_values_narrower_than_keys_are_as_exact_as_stock_rmpad(tmp_path: Path, model_type: str, name: str) -> None:
    assert_as_close_as_stock(save_two_layers(tmp_path, model_type), name)


@gpu_kernels("flash_attn_4", "flash_attn_2")
@pytest.mark.parametrize("compiled", [False, True])
def test_learned_sinks_are_as_exact_as_stock_in_eager_mode(tmp_path: Path, name: str, compiled: bool) -> None:
    """Stock's rmpad mode is wrong there. Grouped products sum bias gradients in bf16, hence the second comparison."""
    eager = {"attn_implementation": "eager", "_experts_implementation": "grouped_mm" if compiled else "eager"}
    biases = {f"model.layers.{layer}.mlp.experts.gate_up_proj_bias" for layer in range(2)} if compiled else set()
    path = save_two_layers(tmp_path, "gpt_oss")
    assert_as_close_as_stock(path, name, compiled, biases, "padded", **eager)
    if compiled:
        assert_as_close_as_stock(path, name, compiled, baseline="uncompiled", **eager)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_experts_are_as_exact_as_stock_rmpad(tmp_path: Path, model_type: str, experts: str) -> None:
    assert_as_close_as_stock(save_two_layers(tmp_path, model_type), "auto", _experts_implementation=experts)


@pytest.mark.parametrize("model_type", COMPILED)
def test_compiled_types_are_as_exact_as_stock_rmpad(tmp_path: Path, model_type: str) -> None:
    assert_compiled_as_close(tmp_path, model_type, STOCK_ATTENTION.get(model_type, "flash_attention_2"))
