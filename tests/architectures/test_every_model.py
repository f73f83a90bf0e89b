"""Every causal language model of transformers is exact through the engine, or refused by name."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.batches import Sample, make_batch
from huggingface_hub.errors import StrictDataclassError
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils.checkpoint import CheckpointError

from tests import support
from tests.architectures.outcome import EXACT, HYBRIDS, NOT_RUN, outcome_of, supports_checkpointing
from tests.architectures.tiny_configs import MODEL_TYPES, SEED, save_causal, tiny_config
from tests.engine.carried_cases import ONE_GROUP
from tests.engine.ranks import check_exact_on_ranks
from tests.engine.test_exactness import CASES
from tests.mixers import hybrids
from tests.modalities import tiny_vision
from tests.precision import BF16, in_float64
from verl_pg_plugin.gradient_checkpointing import CHECKPOINTS_FORWARD, FLOAT32_ANGLE_TYPES
from verl_pg_plugin.lm_head import fused_obstacle
from verl_pg_plugin.skeleton import text_skeleton

SAMPLES = [*CASES["uneven_groups_and_prompts_of_different_length"], *CASES["multi_turn_branches_three_deep"]]
TYPES = [name for name in MODEL_TYPES if name not in HYBRIDS]
EXACT_TYPES = [name for name in TYPES if outcome_of(name).status == EXACT]
"""tests/architectures/test_record.py checks the refusals of the others."""
ZERO_GRADIENTS = {
    # Without rotary embedding a bias of the keys adds the same number to all scores of a query: softmax ignores it.
    "opt": {f"model.decoder.layers.{layer}.self_attn.k_proj.bias" for layer in range(2)}
}


def engine_of(model_type: str, folder: Path, engine: dict | None = None, model: dict | None = None) -> Any:
    """Make an engine of a tiny model in ``folder``, with gradient checkpointing if the type has it."""
    checkpointing = {"enable_gradient_checkpointing": supports_checkpointing(model_type)}
    return support.make_engine(save_causal(folder, model_type), engine=engine, model={**checkpointing, **(model or {})})


def assert_exact(engine: Any, model_type: str, folder: Path, samples: Sequence[Sample] = SAMPLES) -> None:
    """Compare log-probs, entropies, squared probabilities if the head computes them, and gradients."""
    batch = make_batch(samples, calculate_sum_pi_squared=engine.log_prob_head is None or not engine.log_prob_head.fused)
    actual, expected = support.run_engine(engine, batch), support.run_reference(str(folder), batch)
    zero = ZERO_GRADIENTS.get(model_type, set())
    support.assert_same(without(actual, zero), without(expected, zero))
    for name in zero:
        largest = expected.gradients[name.replace("bias", "weight")].abs().max()
        assert actual.gradients[name].abs().max() <= 1e-5 * largest


def without(result: support.Result, names: set[str]) -> support.Result:
    return replace(result, gradients={name: grad for name, grad in result.gradients.items() if name not in names})


@pytest.mark.parametrize("model_type", EXACT_TYPES)
def test_accepted_types_are_exact(model_type: str, tmp_path: Path) -> None:
    engine = engine_of(model_type, tmp_path, {"logits_chunk_size": 24})
    assert (engine.log_prob_head is not None) == outcome_of(model_type).head_in_chunks
    assert_exact(engine, model_type, tmp_path)


@pytest.mark.parametrize("model_type", [name for name in TYPES if outcome_of(name).status == NOT_RUN])
def test_types_not_run_cannot_be_built(model_type: str) -> None:
    with pytest.raises((AttributeError, StrictDataclassError)):
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type))


@pytest.mark.parametrize("model_type", [name for name in TYPES if outcome_of(name).value_head])
def test_critics_are_exact(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    config = tiny_config(model_type, num_labels=1)
    transformers.AutoModelForTokenClassification.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    batch = support.critic_batch(SAMPLES)
    batch["returns"] = batch["returns"] + 2  # above all values, so that terms of the bias gradient do not cancel
    support.check_exact(support.make_engine(str(tmp_path), critic=True), str(tmp_path), batch)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EXACT_TYPES)
def test_fused_kernels_are_exact_or_refused(model_type: str, tmp_path: Path) -> None:
    if outcome_of(model_type).fused_kernels:
        engine = engine_of(model_type, tmp_path, model=support.FUSED_HEAD)
        assert engine.log_prob_head.fused is not None
        assert_exact(engine, model_type, tmp_path)
    else:
        obstacle = re.escape(fused_obstacle(text_skeleton(tiny_config(model_type))))
        with pytest.raises(ValueError, match=rf"use_fused_kernels=True: {obstacle} \(fix: .*=False"):
            engine_of(model_type, tmp_path, model=support.FUSED_HEAD)


FUSED_HYBRIDS = [*hybrids.KINDS, "bamba"]  # stock Nemotron-H rounds its logits to float32


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FUSED_HYBRIDS, *tiny_vision.HYBRID_KINDS])
def test_fused_kernels_of_hybrids_are_exact(kind: str, tmp_path: Path) -> None:
    text_alone = kind in FUSED_HYBRIDS
    path = (hybrids.save_hybrid if text_alone else tiny_vision.save_vision_model)(tmp_path, kind)
    with in_float64():
        engine = support.make_engine(path, model=support.FUSED_HEAD)
        assert engine.log_prob_head.fused is not None
        batch = make_batch(hybrids.SAMPLES) if text_alone else tiny_vision.image_batch(path, tiny_vision.TEXT_ALONE)
        support.check_exact(engine, path, batch)


CHECKPOINTED = [
    name if name in ("olmo2", "qwen3") else pytest.param(name, marks=pytest.mark.slow)
    for name in filter(supports_checkpointing, EXACT_TYPES)
]


@pytest.mark.parametrize("model_type", CHECKPOINTED)
def test_torch_before_2_13_trains_all_types_but_those_listed(model_type, tmp_path, monkeypatch) -> None:
    cast = FSDPState._cast_forward_inputs

    def cast_in_the_forward_alone(self, args, kwargs):
        """Cast as torch 2.11 and 2.12 do when they recompute layers."""
        return (args, kwargs) if self._training_state == TrainingState.PRE_BACKWARD else cast(self, args, kwargs)

    monkeypatch.setattr(FSDPState, "_cast_forward_inputs", cast_in_the_forward_alone)
    engine = engine_of(model_type, tmp_path, BF16)
    fails = pytest.raises(CheckpointError, match="different metadata")
    with fails if model_type in FLOAT32_ANGLE_TYPES and not CHECKPOINTS_FORWARD else nullcontext():
        support.run_engine(engine, make_batch(SAMPLES))


SPLIT = ["gpt_oss", "deepseek_v2", "deepseek_v3", "gemma4", "glm4_moe_lite", *{"hrm_text"} & {*EXACT_TYPES}]


@pytest.mark.parametrize("model_type", SPLIT)
def test_split_groups_are_exact(model_type: str, tmp_path: Path, caplog) -> None:
    path = save_causal(tmp_path, model_type)
    batch = make_batch(ONE_GROUP, max_token_len_per_gpu=36)
    caches = model_type != "hrm_text"  # whose layers run several times
    support.check_exact(support.make_engine(path, splits=True), path, batch, splits=caches)
    assert ("compute its prefix again" in caplog.text) != caches


def test_sinks_have_exact_gradients_if_attention_is_recomputed(tmp_path: Path) -> None:
    engine = support.make_engine(save_causal(tmp_path, "gpt_oss"), engine={"activations": "inputs"})
    support.check_exact(engine, str(tmp_path), make_batch(SAMPLES, max_token_len_per_gpu=160))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3", "gemma3", "gemma4", "mistral3"])
def test_heads_on_two_ranks_are_exact(model_type: str, tmp_path: Path) -> None:
    spread = {"ulysses_sequence_parallel_size": 2}
    check_exact_on_ranks(save_causal(tmp_path, model_type), partial(make_batch, ONE_GROUP), engine=spread)
