"""Options that do not fit the checkpoint are refused before Ray starts, with the nearest that does."""

from __future__ import annotations

import pytest
import transformers
from config_support import TINY, save_checkpoint

from verl_pg_plugin.config import Mode
from verl_pg_plugin.config.checkpoint_checks import checkpoint_violations

ACTOR = "actor_rollout_ref.actor"
PATH = "actor_rollout_ref.model.path"
FUSED = "actor_rollout_ref.model.use_fused_kernels"
SP_SIZE = f"{ACTOR}.ulysses_sequence_parallel_size"
HEADS = {**TINY, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture
def violations_of(make_config, tmp_path):
    def run(hf_config, mode=Mode.PACKED, **settings):
        return checkpoint_violations(make_config(mode, {PATH: save_checkpoint(tmp_path, hf_config), **settings}))

    return run


@pytest.mark.parametrize("sp_size", [1, 2, 4, 8])
def test_sizes_that_divide_the_heads_or_copy_them_whole_are_accepted(violations_of, sp_size):
    assert violations_of(transformers.Qwen3Config(**HEADS), **{SP_SIZE: sp_size}) == []


@pytest.mark.parametrize(("sp_size", "fitting"), [(3, 2), (6, 4), (16, 8)])
def test_other_sizes_name_the_next_smaller_one(violations_of, sp_size, fitting):
    (violation,) = violations_of(transformers.Qwen3Config(**HEADS), **{SP_SIZE: sp_size})
    assert violation.rule == "ulysses_heads"
    assert "8 query and 4 key/value heads" in violation.why
    assert violation.fix == f"{SP_SIZE}={fitting}"
    assert violations_of(transformers.Qwen3Config(**HEADS), Mode.RMPAD, **{SP_SIZE: sp_size}) == []


def test_the_size_in_the_engine_config_counts_unless_the_deprecated_one_is_set(violations_of):
    key = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    (violation,) = violations_of(transformers.Qwen3Config(**HEADS), **{key: 3})
    assert violation.fix == f"{key}=2"
    assert violations_of(transformers.Qwen3Config(**HEADS), **{key: 3, SP_SIZE: 2}) == []


def test_the_critic_has_a_size_of_its_own(violations_of):
    critic = {"algorithm.adv_estimator": "gae", "critic.model.path": f"${{{PATH}}}"}
    key = "critic.fsdp.ulysses_sequence_parallel_size"
    (violation,) = violations_of(transformers.Qwen3Config(**HEADS), **critic, **{key: 3})
    assert violation.fix == f"{key}=2"


def test_fused_kernels_need_a_head_that_comes_last(violations_of):
    assert violations_of(transformers.Qwen3Config(**TINY), **{FUSED: True}) == []
    (violation,) = violations_of(transformers.CohereConfig(**TINY), **{FUSED: True})
    assert violation.rule == "fused_kernels_model"
    assert "CohereForCausalLM changes what its head puts out" in violation.why
    assert violation.fix == f"{FUSED}=False"


def test_fused_kernels_refuse_a_head_with_a_bias(violations_of):
    (violation,) = violations_of(transformers.PhiConfig(**TINY), **{FUSED: True})
    assert "the head has a bias" in violation.why


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "Olmo2", "Gemma3Text", "Glm4"])
def test_fused_kernels_take_every_head_that_comes_last(violations_of, name):
    assert violations_of(getattr(transformers, f"{name}Config")(**TINY, pad_token_id=0), **{FUSED: True}) == []


def test_models_without_gradient_checkpointing_are_refused_with_it_and_run_without(violations_of):
    sizes = {**TINY, "pad_token_id": 0, "num_key_value_heads": 1, "num_experts_per_tok": 2, "kv_channels": 8}
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    (violation,) = violations_of(transformers.JetMoeConfig(**sizes), **{key: True})
    assert (violation.rule, violation.fix) == ("gradient_checkpointing_model", f"{key}=False")
    assert violations_of(transformers.JetMoeConfig(**sizes), **{key: False}) == []
