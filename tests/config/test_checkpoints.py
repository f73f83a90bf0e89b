"""Checkpoints that cannot run are refused before Ray starts; those that can are not."""

import json
from pathlib import Path

import pytest
import transformers

from tests.config.config_support import TINY, save_checkpoint
from verl_pg_plugin.config import Mode, machine
from verl_pg_plugin.config.keys import CRITIC_MODEL, MODEL
from verl_pg_plugin.config.machine import read_checkpoint
from verl_pg_plugin.config.preflight import sharing_issues


@pytest.fixture
def issues_of(config_of):
    def run(path: Path | str, mode: Mode = Mode.PACKED, section: str = MODEL, **settings):
        return read_checkpoint(config_of({f"{section}.path": str(path), **settings}, mode), section)[1]

    return run


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    ("hf_config", "why"),
    [
        (transformers.Qwen2_5_VLConfig(text_config={**TINY, "rope_parameters": ROPE}), "at positions of images"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.Glm4vConfig(), "multimodal"),
        (transformers.BloomConfig(), "attention interface"),
        (transformers.Starcoder2Config(residual_dropout=0.1), "residual_dropout=0.1"),
        (transformers.MixtralConfig(router_jitter_noise=0.01), "router_jitter_noise=0.01"),
        (transformers.PhiConfig(resid_pdrop=0.1), "resid_pdrop=0.1"),
        (transformers.ViTConfig(attention_probs_dropout_prob=0.0), "no causal language model"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_architectures_that_would_be_computed_wrongly_are_refused(issues_of, tmp_path, hf_config, why):
    """Of types with a causal language model docs/models.md has all; tests/architectures hold it to the code."""
    checkpoint = save_checkpoint(tmp_path, hf_config)
    (issue,) = issues_of(checkpoint)
    assert why in issue.why
    assert "override_config" in issue.fix or "use_prefix_grouper=False" in issue.fix
    assert issues_of(checkpoint, Mode.RMPAD) == [], "stock verl may run it"


def test_a_checkpoint_that_verl_builds_without_its_head_is_refused(issues_of, tmp_path):
    save_checkpoint(tmp_path, transformers.GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "architectures": ["GPT2LMHeadModel"]}))
    (issue,) = issues_of(tmp_path)
    assert "verl builds gpt2 without its LM head: GPT2LMHeadModel" in issue.why


def test_dropout_is_named_by_its_key_and_lifted_by_the_advised_override(issues_of, tmp_path, checkpoint):
    key = f"{MODEL}.override_config.attention_dropout"
    path = save_checkpoint(tmp_path, transformers.Qwen3Config(**TINY, attention_dropout=0.1))
    (issue,) = issues_of(path)
    assert (issue.setting, issue.fix) == (f"{key}=0.1", f"++{key}=0.0")
    assert issues_of(path, **{key: 0.0}) == []
    assert issues_of(checkpoint, **{key: 0.2})[0].key == key
    inner = f"{MODEL}.override_config.model_config.attention_dropout"  # verl reads such a section in place of the outer
    (issue,) = issues_of(path, **{inner: 0.1})
    assert issue.fix == f"++{inner}=0.0"
    assert issues_of(path, **{inner: 0.0}) == []


@pytest.mark.parametrize(("name", "value"), [("num_hidden_layers", "two"), ("rope_scaling", {"rope_type": "yarn"})])
def test_an_override_that_does_not_fit_the_config_is_named_and_not_the_config(issues_of, checkpoint, name, value):
    (issue,) = issues_of(checkpoint, **{f"{MODEL}.override_config.{name}": value})
    assert issue.setting == f"{MODEL}.override_config={ {name: value} }"
    assert issue.why.startswith("does not fit the checkpoint's config: ")
    assert "\n" not in issue.why


def test_sequences_that_would_lend_others_their_rotary_frequencies_are_warned_of(config_of, tmp_path):
    kinds = {"sliding_attention": "default", "full_attention": "dynamic"}
    rope = {layer: {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4} for layer, kind in kinds.items()}
    path = str(save_checkpoint(tmp_path, transformers.Gemma3TextConfig(**TINY, rope_parameters=rope)))
    settings = {f"{MODEL}.path": path, "data.max_prompt_length": 192}
    fits, exceeds = ({**settings, "data.max_response_length": most} for most in (8000, 8001))
    assert sharing_issues(config_of(fits)) == []
    (issue,) = sharing_issues(config_of(exceeds))
    assert (issue.is_warning, issue.fix) == (True, "data.max_response_length=8000")


@pytest.mark.parametrize("mode", [Mode.RMPAD, Mode.PACKED])
def test_a_folder_that_is_missing_or_no_checkpoint_is_refused_in_every_mode(issues_of, tmp_path, mode):
    (issue,) = issues_of("./no/such/folder", mode)
    assert (issue.setting, issue.why) == (f"{MODEL}.path=./no/such/folder", "no such folder")
    assert "no config.json" in issues_of(tmp_path, mode)[0].why
    key = f"{MODEL}.hf_config_path"
    assert issues_of(tmp_path, mode, **{key: "/gone"})[0].fix.startswith(f"{key}=")
    assert "verl does not expand ~" in issues_of("~/model", mode)[0].fix


def test_a_model_in_the_cache_is_looked_at(issues_of, tmp_path, monkeypatch):
    folder = save_checkpoint(tmp_path, transformers.Qwen3Config(**TINY, attention_dropout=0.1))
    monkeypatch.setattr(machine, "try_to_load_from_cache", lambda repo, name: f"{folder}/config.json")
    assert "attention_dropout" in issues_of("somebody/model")[0].why


@pytest.mark.parametrize("content", ["{", '{"model_type": "no_such_architecture"}', "{}", "7"])
def test_an_unreadable_config_or_one_without_architecture_is_one_line(issues_of, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    (issue,) = issues_of(tmp_path)
    assert "transformers cannot read its config.json" in issue.why
    assert "\n" not in issue.why
    transformers.Qwen3Config(**TINY).save_pretrained(tmp_path)
    assert '"architectures": [' in issues_of(tmp_path)[0].fix


def test_code_of_a_checkpoint_never_runs_in_front_of_ray(issues_of, tmp_path):
    marker = tmp_path / "executed"
    (tmp_path / "configuration_own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    own = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
    write = (tmp_path / "config.json").write_text
    trusts = {f"{MODEL}.trust_remote_code": True}
    write(json.dumps(own))
    assert f"{MODEL}.trust_remote_code=True" in issues_of(tmp_path)[0].fix
    assert issues_of(tmp_path, **trusts) == []
    for stated, why in (("vision_config", "own is multimodal"), ("rope_scaling", "own uses three-dimensional")):
        write(json.dumps({**own, stated: {"mrope_section": [2, 3, 3]}}))
        (issue,) = issues_of(tmp_path, **trusts)
        assert (issue.is_warning, why in issue.why) == (True, True), "its code may leave that out"
    write(json.dumps({"auto_map": auto_map, "template": "${x"}))
    assert issues_of(tmp_path, **trusts) == []
    assert not marker.exists()


def test_a_critic_needs_a_token_classifier(issues_of, models):
    critic = {"algorithm.adv_estimator": "gae"}
    (issue,) = issues_of(models / "olmo2", section=CRITIC_MODEL, **critic)
    assert issue.setting == f"{CRITIC_MODEL}.path={models}/olmo2"
    assert "no token classifier for 'olmo2'" in issue.why
    assert issues_of(models / "olmo2", Mode.RMPAD, section=CRITIC_MODEL, **critic) == []
