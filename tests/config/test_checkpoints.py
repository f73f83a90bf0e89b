"""Checkpoints that cannot run are refused before Ray starts; those that can are not."""

import json
from pathlib import Path

import pytest
import transformers

from tests.config.config_support import TINY, save_checkpoint
from verl_pg_plugin.config import Mode
from verl_pg_plugin.config.checkpoint import read_checkpoint
from verl_pg_plugin.config.keys import CRITIC_MODEL, MODEL
from verl_pg_plugin.config.preflight import sharing_issues


@pytest.fixture
def issues_of(config_of):
    def run(path: Path | str, section: str = MODEL, **settings):
        return read_checkpoint(config_of({f"{section}.path": str(path), **settings}), section)[1]

    return run


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    ("hf_config", "why"),
    [
        (transformers.Qwen2_5_VLConfig(text_config={**TINY, "rope_parameters": ROPE}), "with images and custom code"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.Qwen3Config(**TINY, is_causal=False), "see later ones (is_causal=False"),
        (transformers.Gemma3TextConfig(**TINY, use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        (transformers.Gemma4TextConfig(**TINY, use_bidirectional_attention="all"), "see later ones ("),
        (transformers.Idefics3Config(), "multimodal"),
        (transformers.BloomConfig(), "attention interface"),
        (transformers.MixtralConfig(router_jitter_noise=0.01), "router_jitter_noise=0.01"),
        (transformers.PhiConfig(resid_pdrop=0.1), "resid_pdrop=0.1"),
        (transformers.ViTConfig(attention_probs_dropout_prob=0.0), "no causal language model"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_inexact_architectures_are_refused(issues_of, config_of, tmp_path, hf_config, why):
    """docs/models.md has all causal types; tests/architectures compares it with the code."""
    checkpoint = save_checkpoint(tmp_path, hf_config)
    (issue,) = issues_of(checkpoint)
    assert why in issue.why
    assert "override_config" in issue.fix or "use_prefix_grouper=False" in issue.fix
    stock = config_of({f"{MODEL}.path": str(checkpoint)}, Mode.RMPAD)
    assert sharing_issues(stock) == [], "stock verl may run it"


def test_bidirectional_images_are_accepted_and_checkpoints_without_a_head_refused(issues_of, tmp_path):
    hf_config = transformers.Gemma4TextConfig(use_bidirectional_attention="vision")
    assert issues_of(save_checkpoint(tmp_path, hf_config)) == []
    save_checkpoint(tmp_path, transformers.GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "architectures": ["GPT2LMHeadModel"]}))
    (issue,) = issues_of(tmp_path)
    assert "verl builds gpt2 without its LM head: GPT2LMHeadModel" in issue.why


def test_dropout_is_named_by_its_key_and_lifted_by_an_override(issues_of, tmp_path, checkpoint, monkeypatch):
    key = f"{MODEL}.override_config.attention_dropout"
    path = save_checkpoint(tmp_path, transformers.Qwen3Config(**TINY, attention_dropout=0.1))
    (issue,) = issues_of(path)
    assert (issue.setting, issue.fix) == (f"{key}=0.1", f"++{key}=0.0")
    assert issues_of(path, **{key: 0.0}) == []
    assert issues_of(checkpoint, **{key: 0.2})[0].key == key
    inner = f"{MODEL}.override_config.model_config.attention_dropout"  # verl reads it instead of the outer section
    (issue,) = issues_of(path, **{inner: 0.1})
    assert issue.fix == f"++{inner}=0.0"
    assert issues_of(path, **{inner: 0.0}) == []
    # Checkpoints in the hub's cache are read too.
    model = tmp_path / "models--somebody--model"
    save_checkpoint(model / "snapshots/1", transformers.Qwen3Config(**TINY, attention_dropout=0.1))
    (model / "refs").mkdir()
    (model / "refs/main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "attention_dropout" in issues_of("somebody/model")[0].why


def test_lengths_that_change_rotary_frequencies_are_warned_of(config_of, tmp_path):
    kinds = {"sliding_attention": "default", "full_attention": "dynamic"}
    rope = {layer: {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4} for layer, kind in kinds.items()}
    path = str(save_checkpoint(tmp_path, transformers.Gemma3TextConfig(**TINY, rope_parameters=rope)))
    settings = {f"{MODEL}.path": path, "data.max_prompt_length": 192}
    fits, exceeds = ({**settings, "data.max_response_length": most} for most in (8000, 8001))
    assert sharing_issues(config_of(fits)) == []
    (issue,) = sharing_issues(config_of(exceeds))
    assert (issue.is_warning, issue.fix) == (True, "data.max_response_length=8000")


def test_remote_missing_and_unreadable_checkpoints_are_left_to_verl(config_of, issues_of, tmp_path):
    for path in ("./no/such/folder", "no/such/model", "~/model", "hdfs://cluster/model", str(tmp_path)):
        assert read_checkpoint(config_of({f"{MODEL}.path": path})) == (None, []), path
    for content in ("{", '{"model_type": "no_such_architecture"}', "7"):
        (tmp_path / "config.json").write_text(content)
        assert issues_of(tmp_path) == [], content


def test_code_of_a_checkpoint_does_not_run_before_ray(issues_of, tmp_path):
    marker = tmp_path / "executed"
    (tmp_path / "configuration_own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    own = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(own))
    for trusted in (False, True):
        assert issues_of(tmp_path, **{f"{MODEL}.trust_remote_code": trusted}) == []
        assert not marker.exists()


def test_critics_need_a_token_classifier(issues_of, models):
    critic = {"algorithm.adv_estimator": "gae"}
    (issue,) = issues_of(models / "olmo2", section=CRITIC_MODEL, **critic)
    assert issue.setting == f"{CRITIC_MODEL}.path={models}/olmo2"
    assert "no token classifier for 'olmo2'" in issue.why
