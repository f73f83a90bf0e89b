"""Checkpoints that cannot run are refused before Ray starts; those that can are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from config_support import TINY, save_checkpoint

from verl_pg_plugin.attention.kernels import specs
from verl_pg_plugin.config import Mode, facts
from verl_pg_plugin.config.checkpoint_checks import checkpoint_violations

PATH = "actor_rollout_ref.model.path"
TRUST = "actor_rollout_ref.model.trust_remote_code"


@pytest.fixture
def violations_of(make_config):
    def run(path: Path | str, mode: Mode = Mode.PACKED, **settings):
        return checkpoint_violations(make_config(mode, {PATH: str(path), **settings}))

    return run


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2", "Llama", "Mistral", "Gemma3Text", "Qwen3Moe"])
def test_decoders_that_use_the_attention_interface_are_accepted(violations_of, tmp_path, name):
    assert violations_of(save_checkpoint(tmp_path, getattr(transformers, f"{name}Config")(**TINY))) == []


def test_capped_scores_are_refused_where_no_kernel_caps_them(violations_of, tmp_path):
    (violation,) = violations_of(save_checkpoint(tmp_path, transformers.Gemma2Config(**TINY)))
    assert violation.rule == "attention_kernel_model"
    assert "sdpa does not cap scores" in violation.why


def test_a_model_that_needs_a_package_is_refused_before_ray_and_not_by_a_worker(violations_of, tmp_path, monkeypatch):
    checkpoint = save_checkpoint(tmp_path, transformers.Gemma2Config(**TINY))
    monkeypatch.setattr(facts, "get_device_name", lambda: "cuda")
    by_name = {"prefix_grouper.attention_kernel": "torch_varlen"}
    for asked in ({}, by_name):
        (violation,) = violations_of(checkpoint, **asked)
        assert violation.rule == "attention_kernel_model"
        assert "torch_varlen does not cap scores" in violation.why
        assert violation.fix.startswith("pip install --no-build-isolation flash-attn, or ")
    monkeypatch.setattr(specs, "version", lambda package: "1.0")
    assert violations_of(checkpoint) == []
    (violation,) = violations_of(checkpoint, **by_name)
    assert violation.fix.startswith("++prefix_grouper.attention_kernel=flash_attn_2, or ")


def test_learned_sinks_are_taken_on_a_cpu_and_refused_on_a_gpu(violations_of, tmp_path, monkeypatch):
    checkpoint = save_checkpoint(tmp_path, transformers.GptOssConfig(**TINY, num_local_experts=2))
    assert violations_of(checkpoint) == []
    monkeypatch.setattr(facts, "get_device_name", lambda: "cuda")
    (violation,) = violations_of(checkpoint)
    assert violation.rule == "attention_kernel_model"
    assert "flash_attn_2 takes no learned attention sinks" in violation.why
    (violation,) = violations_of(checkpoint, **{"prefix_grouper.attention_kernel": "sdpa"})
    assert "sdpa takes no learned attention sinks on a cuda device, only on cpu" in violation.why
    assert "use_prefix_grouper=False" in violation.fix


def test_sliding_window_is_accepted(violations_of, tmp_path):
    hf_config = transformers.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    assert violations_of(save_checkpoint(tmp_path, hf_config)) == []


DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
ROPE_BY_LAYER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": DYNAMIC_ROPE,
}


@pytest.mark.parametrize(
    ("hf_config", "why"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.Qwen2VLConfig(), "multimodal"),
        (transformers.Gemma3Config(), "multimodal"),
        (transformers.MiniMaxConfig(), "linear attention that is not known to be Gated DeltaNet"),
        (transformers.MambaConfig(), "layers other than causal attention: mamba"),
        (transformers.JambaConfig(), "layers other than causal attention: mamba"),
        (transformers.RwkvConfig(), "recurrent state"),
        (transformers.Llama4TextConfig(), "chunked_attention"),
        (transformers.BloomConfig(), "attention interface"),
        (transformers.BertConfig(), "is an encoder"),
        (transformers.DogeConfig(), "a mask of its own"),
        (transformers.AriaTextConfig(), "experts' weights one by one"),
        (transformers.PhimoeConfig(), "draws experts at random"),
        (transformers.PhimoeConfig(router_jitter_noise=0.0), "draws experts at random"),
        (transformers.PersimmonConfig(), "num_key_value_heads"),
        (transformers.HrmTextConfig(), "num_key_value_heads"),
        (transformers.ModernBertDecoderConfig(), "num_key_value_heads"),
        (transformers.Starcoder2Config(residual_dropout=0.1), "residual_dropout=0.1"),
        (transformers.Starcoder2Config(embedding_dropout=0.1), "embedding_dropout=0.1"),
        (transformers.OPTConfig(num_key_value_heads=12), "dropout=0.1: a shared prefix"),
        (transformers.MixtralConfig(router_jitter_noise=0.01), "router_jitter_noise=0.01"),
        (transformers.PhiConfig(resid_pdrop=0.1), "resid_pdrop=0.1"),
        (transformers.GPTNeoXConfig(hidden_dropout=0.1, num_key_value_heads=64), "hidden_dropout=0.1"),
        (transformers.Qwen3Config(**TINY, attention_dropout=0.1), "attention_dropout=0.1"),
        (transformers.Qwen2Config(**TINY, rope_parameters=DYNAMIC_ROPE), "rope_type=dynamic"),
        (transformers.Gemma3TextConfig(**TINY, rope_parameters=ROPE_BY_LAYER_TYPE), "rope_type=dynamic"),
        (
            transformers.AutoConfig.for_model(
                "qwen3_5", text_config={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
            ),
            "rope_type=dynamic",
        ),
        (transformers.ViTConfig(attention_probs_dropout_prob=0.0), "no causal language model"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_architectures_that_would_be_computed_wrongly_are_refused(violations_of, tmp_path, hf_config, why):
    checkpoint = save_checkpoint(tmp_path, hf_config)
    (violation,) = violations_of(checkpoint)
    assert violation.rule == "architecture"
    assert why in violation.why
    assert "override_config" in violation.fix or "use_prefix_grouper=False" in violation.fix
    assert violations_of(checkpoint, Mode.RMPAD) == [], "stock verl may run it"


def test_a_checkpoint_that_verl_builds_without_its_head_is_refused(violations_of, tmp_path):
    still = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    save_checkpoint(tmp_path, transformers.GPT2Config(**still))
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "architectures": ["GPT2LMHeadModel"]}))
    (violation,) = violations_of(tmp_path)
    assert "verl builds gpt2 without its LM head: GPT2LMHeadModel" in violation.why


def test_the_advised_override_lifts_attention_dropout(violations_of, tmp_path):
    save_checkpoint(tmp_path, transformers.Qwen3Config(**TINY, attention_dropout=0.1))
    key = "actor_rollout_ref.model.override_config.attention_dropout"
    assert f"{key}=0.0" in violations_of(tmp_path)[0].fix
    assert violations_of(tmp_path, **{key: 0.0}) == []


def test_dropout_switched_on_by_an_override_is_refused(violations_of, checkpoint):
    key = "actor_rollout_ref.model.override_config.attention_dropout"
    assert violations_of(checkpoint, **{key: 0.2})[0].rule == "architecture"


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("path", ["/no/such/folder", "./no/such/folder", "~/no/such/folder"])
def test_missing_folder(violations_of, path, mode):
    (violation,) = violations_of(path, mode)
    assert (violation.rule, violation.why) == ("checkpoint_path", "no such folder")
    assert path in str(violation)


def test_home_folder_is_spelled_out_because_verl_does_not_expand_it(violations_of, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_checkpoint(tmp_path / "model")
    (violation,) = violations_of("~/model")
    assert f"{PATH}={tmp_path}/model" in violation.fix
    assert violations_of(tmp_path / "model") == []


@pytest.mark.parametrize("path", ["Qwen/Qwen3-4B", "hdfs://cluster/models/qwen3"])
def test_paths_that_workers_download_are_left_to_them(violations_of, path):
    assert violations_of(path) == []


@pytest.mark.parametrize("mode", list(Mode))
def test_folder_without_tokenizer(violations_of, tmp_path, checkpoint, mode):
    (save_checkpoint(tmp_path) / "tokenizer.json").unlink()
    (violation,) = violations_of(tmp_path, mode)
    assert violation.rule == "checkpoint_tokenizer"
    assert "tokenizer.save_pretrained" in violation.fix
    assert violations_of(tmp_path, mode, **{"actor_rollout_ref.model.tokenizer_path": str(checkpoint)}) == []


@pytest.mark.parametrize("mode", list(Mode))
def test_folder_without_config(violations_of, tmp_path, mode):
    save_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    (violation,) = violations_of(tmp_path, mode)
    assert violation.rule == "checkpoint_config"
    assert "no config.json" in violation.why


def test_config_without_architecture(violations_of, tmp_path):
    save_checkpoint(tmp_path)
    transformers.Qwen3Config(**TINY).save_pretrained(tmp_path)
    (violation,) = violations_of(tmp_path)
    assert violation.rule == "checkpoint_config"
    assert '"architectures": [' in violation.fix


def test_empty_folder_is_one_mistake(violations_of, tmp_path):
    assert [found.rule for found in violations_of(tmp_path)] == ["checkpoint_config"]


def test_dropout_of_a_checkpoint_is_named_by_its_key(violations_of, tmp_path):
    (violation,) = violations_of(save_checkpoint(tmp_path, transformers.Qwen3Config(**TINY, attention_dropout=0.1)))
    assert str(violation.settings[0]) == "actor_rollout_ref.model.override_config.attention_dropout=0.1"
    assert violation.fix == "++actor_rollout_ref.model.override_config.attention_dropout=0.0"


@pytest.mark.parametrize("content", ["{", '{"model_type": "no_such_architecture"}', "{}"])
def test_unreadable_or_unknown_config_is_one_message(violations_of, tmp_path, content):
    save_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(content)
    (violation,) = violations_of(tmp_path)
    assert violation.rule == "checkpoint_config"
    assert "\n" not in violation.why


def test_code_in_a_checkpoint_runs_only_when_the_user_says_so(violations_of, tmp_path):
    save_checkpoint(tmp_path)
    marker = tmp_path / "executed"
    (tmp_path / "configuration_own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PretrainedConfig\n"
        f"Path({str(marker)!r}).touch()\n"
        "class OwnConfig(PretrainedConfig):\n"
        "    model_type = 'own'\n"
    )
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    own = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(own))

    (violation,) = violations_of(tmp_path)
    assert violation.rule == "checkpoint_config"
    assert f"{TRUST}=True" in violation.fix
    assert not marker.exists()

    assert violations_of(tmp_path, **{TRUST: True}) == []
    assert marker.exists()


CRITIC = {"algorithm.adv_estimator": "gae"}


def test_critic_checkpoint_that_does_not_exist_is_named(make_config):
    (violation,) = checkpoint_violations(make_config(Mode.PACKED, {**CRITIC, "critic.model.path": "/none/critic"}))
    assert str(violation).startswith("critic.model.path=/none/critic")


def test_critic_of_an_architecture_without_token_classifier_is_refused(make_config, tmp_path):
    path = save_checkpoint(tmp_path, transformers.Olmo2Config(**TINY))
    config = make_config(Mode.PACKED, {**CRITIC, "critic.model.path": str(path)})
    (violation,) = checkpoint_violations(config)
    assert "no token classifier for 'olmo2'" in violation.why
    assert checkpoint_violations(make_config(Mode.RMPAD, {**CRITIC, "critic.model.path": str(path)})) == []


def test_a_checkpoint_that_actor_and_critic_share_is_reported_once(make_config):
    paths = {PATH: "/none", "critic.model.path": f"${{{PATH}}}"}
    assert len(checkpoint_violations(make_config(Mode.PACKED, {**CRITIC, **paths}))) == 1
