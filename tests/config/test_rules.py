"""Limits of an engine are refused before Ray starts and by the engine itself, with the same message."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config.model import MtpConfig

from tests.config.config_support import CRITIC
from verl_pg_plugin.config import Mode, rules
from verl_pg_plugin.config.keys import ACTOR, MODEL, REF, ROLLOUT
from verl_pg_plugin.config.mode import SP_SIZE as SP
from verl_pg_plugin.config.mode import Engine
from verl_pg_plugin.config.preflight import sharing_issues
from verl_pg_plugin.config.rules import RULES, STOCK, check_engine, engine_of, roles_of
from verl_pg_plugin.issue import Issue
from verl_pg_plugin.mixers import MIXERS

PACKED, PADDED = Mode.PACKED, Mode.PADDED_GROUPS
GAE = f"{CRITIC} {ROLLOUT}.n=4 "
NEXT, VL = f"{MODEL}.path={{models}}/qwen3_next", f"{MODEL}.path={{models}}/qwen3_vl"
FUSED, COMPILED = f"{MODEL}.use_fused_kernels=True", "++prefix_grouper.compile_layers=True"
BACKEND, UNPADDED = f"{MODEL}.fused_kernel_options.impl_backend", f"{MODEL}.use_remove_padding=False"
VISION, QAT = f"{MODEL}.override_config.attn_implementation", f"{ACTOR}.fsdp_config.qat"
KEY_HEADS = f"{MODEL}.override_config.linear_num_key_heads"

REFUSED: list[tuple[Mode, str, str, str, str]] = [
    # mode, overrides, setting (the last override if empty), part of the cause, part of the fix
    (PACKED, f"{QAT}.enable=True {QAT}.mode=w4a4", "", "only weights-only", f"{QAT}.mode=w4a16, or {STOCK}"),
    (PADDED, f"{QAT}.enable=True", "", "in padded groups", f"{QAT}.enable=False"),
    (PACKED, f"{MODEL}.lora_rank=8 {COMPILED}", "", "each LoRA adapter as an FSDP unit", "=False"),
    (PADDED, COMPILED, "", "padded groups", "=False"),
    (PACKED, f"{MODEL}.path={{models}}/gemma2 {FUSED}", "", "changes the output of its head", ""),
    (PACKED, f"{FUSED} {BACKEND}=cutlass", "", "is unknown", "=torch"),
    (PACKED, f"{FUSED} {BACKEND}=triton", "", "needs a GPU", "=torch"),
    (PACKED, f"trainer.nnodes=2 {ACTOR}.{SP}=3", "", "4 query and 2 key/value heads cannot be spread", f"{SP}=2"),
    (PACKED, f"{GAE} trainer.nnodes=2 critic.fsdp.{SP}=3", "", "cannot be spread", f"critic.fsdp.{SP}=2"),
    (PACKED, f"{NEXT} {KEY_HEADS}=3 {ACTOR}.fsdp_config.{SP}=2", "", "qwen3_next: 3 key heads cannot", f"{SP}=1"),
    (PACKED, VL, f"{VISION}=flash_attention_2", "the vision encoder of qwen3_vl", f"{VISION}=sdpa"),
    (PADDED, f"{GAE} critic.model.use_remove_padding=False", "", "critic's", ""),
    (PADDED, f"{ACTOR}.{SP}=2", "", "would cut padded groups", ""),
    (PADDED, FUSED, "", "LM head of padded groups", ""),
    (PADDED, f"{REF}.fsdp_config.pad_to_length=True", "", "the longest group", ""),
    (PADDED, NEXT, UNPADDED, "support packed mode only", ""),
    (PADDED, VL, UNPADDED, "reads images", ""),
]


def engine_configs(config: DictConfig, role: str) -> tuple[Any, Any]:
    """Return engine config and model config of a role, as verl's workers and its V1 trainer make them."""
    section: Any = OmegaConf.to_container(OmegaConf.select(config, role), resolve=True)
    source = OmegaConf.select(config, engine_of(config, role).model_section)
    model = omega_conf_to_dataclass({**OmegaConf.to_container(source, resolve=True), "load_tokenizer": False})
    del section["profiler"]
    if role == "critic":
        model.model_type = "value_model"
        return omega_conf_to_dataclass({**section, "model": None}).engine, model
    if role == REF:
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
            section[f"ppo_{name}"] = section.pop(f"log_prob_{name}")
        section["use_dynamic_bsz"] = section.pop("log_prob_use_dynamic_bsz")
        model.mtp = MtpConfig(enable=False)
    return omega_conf_to_dataclass(section).engine, model


def errors(config: DictConfig) -> list[Issue]:
    return [issue for issue in sharing_issues(config) if not issue.is_warning]


def assert_both_refuse(config: DictConfig, setting: str, why: str, fix: str) -> None:
    """Check that preflight and the engines of all roles refuse a setting with the same message."""
    of_preflight = errors(config)
    before = [issue for issue in of_preflight if why in issue.why]
    engines = [Engine.of(*engine_configs(config, role)) for role in roles_of(config)]
    inside = [issue for engine in engines for rule in RULES for issue in rule(engine) if not issue.is_warning]
    assert before
    assert {issue.why for issue in before} == {issue.why for issue in inside if why in issue.why}
    assert {issue.why for issue in inside} <= {issue.why for issue in of_preflight}, "an engine refuses nothing else"
    assert any(issue.setting.startswith(setting) for issue in before)
    assert all(fix in issue.fix for issue in [*before, *(issue for issue in inside if why in issue.why)])


@pytest.mark.parametrize(("mode", "overrides", "setting", "why", "fix"), REFUSED)
def test_preflight_and_engine_refuse_the_same(mode, overrides, setting, why, fix, config_of) -> None:
    assert_both_refuse(config_of(overrides, mode), setting or overrides.split()[-1], why, fix)


def test_engine_errors_are_one_line_of_setting_cause_and_fix(config_of) -> None:
    key = f"{REF}.fsdp_config.ulysses_sequence_parallel_size"
    config = config_of(f"{key}=2", PADDED)
    check_engine(*engine_configs(config, ACTOR))
    said = rf"{key}=2: sequence parallelism would cut padded groups. Fix: .*; or set .*in verl's SFT trainer"
    with pytest.raises(ValueError, match=said):
        check_engine(*engine_configs(config, REF))


def test_a_config_that_transformers_cannot_build_is_no_error_of_fused_kernels(config_of) -> None:
    """The engine checks the head of what it builds."""
    (issue,) = rules.fused_kernels(engine_of(config_of(FUSED), ACTOR, AutoConfig.for_model("dots1")))
    assert issue.is_warning
    assert issue.setting == FUSED
    assert "transformers builds no dots1 from this config" in issue.why
    assert "(TypeError: " in issue.why


def test_missing_packages_are_refused_with_the_fix(config_of, monkeypatch) -> None:
    find_spec = rules.importlib.util.find_spec
    for name, mixer in MIXERS.items():
        lacking = replace(mixer, machine_obstacles=lambda device: ["no fla: pip install fla-core"])
        monkeypatch.setitem(MIXERS, name, lacking)
    assert "pip install fla-core" in errors(config_of(NEXT))[0].why
    monkeypatch.undo()
    lacking = "prefix_grouper"
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: None if name == lacking else find_spec(name))
    assert errors(config_of("", PADDED))[0].fix.startswith("pip install prefix_grouper, or ")
    monkeypatch.setattr(rules, "compiler_obstacle", lambda *_: "no compiler")
    assert errors(config_of(f"{COMPILED} {ACTOR}.strategy=fsdp2 {REF}.strategy=fsdp2"))[0].why == "no compiler"
    monkeypatch.setattr(rules, "FLOAT32_ANGLE_TYPES", {"qwen3"})
    monkeypatch.setattr(rules, "FSDP2_CASTS_AGAIN", False)
    (issue,) = errors(config_of(f"{ACTOR}.strategy=fsdp2"))
    assert "rotary angles of another dtype" in issue.why
    assert f"{ACTOR}.strategy=fsdp" in issue.fix


def test_float32_is_refused_on_kernels_of_a_gpu_only(config_of, request) -> None:
    key = f"{ACTOR}.fsdp_config.mixed_precision"
    config = {f"{key}.param_dtype": "fp32"}
    assert errors(config_of(config)) == []
    request.getfixturevalue("on_gpu")
    (issue,) = errors(config_of(config))
    assert issue.setting == f"{key}.param_dtype=fp32"
    assert issue.why == "on a GPU ++prefix_grouper.attention_kernel=auto supports only bf16 and fp16"
    assert issue.fix == f"{key}.param_dtype=bf16, or ++prefix_grouper.attention_kernel=sdpa (slow)"
    assert errors(config_of({**config, "prefix_grouper.attention_kernel": "sdpa"})) == []
    assert errors(config_of({f"{key}.param_dtype": "bf16"})) == []


def test_adapter_dropout_is_refused_and_adapters_need_no_reference(config_of, tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    settings = {f"{MODEL}.lora_adapter_path": str(tmp_path), f"{MODEL}.lora_rank": 8, f"{ACTOR}.strategy": "fsdp2"}
    file.write_text('{"r": 8, "lora_dropout": 0.05}')
    (issue,) = errors(config_of(settings))
    assert issue.setting == f"{MODEL}.lora_adapter_path={tmp_path}"
    assert issue.why.startswith(f"{file} has lora_dropout=0.05, ")
    assert issue.fix == f"set lora_dropout to 0 in that file, or {STOCK}"
    assert errors(config_of({**settings, f"{MODEL}.lora_rank": 0})) == [], "verl loads no adapter"
    for content in ('{"lora_dropout": 0.0}', '{"peft_type": "IA3"}', '{"lora_dropout": null}', "{", "[]"):
        file.write_text(content)
        assert errors(config_of(settings)) == [], content
    assert errors(config_of({**settings, f"{MODEL}.lora_adapter_path": "hdfs://cluster/adapter"})) == []
    assert [roles_of(config_of(given)) for given in ("", f"{MODEL}.lora_adapter_path=a/b")] == [[ACTOR, REF], [ACTOR]]


OWN, DEPRECATED = f"{ACTOR}.fsdp_config.{SP}", f"{ACTOR}.{SP}"


@pytest.mark.parametrize(
    ("settings", "size"),
    [("", 1), (f"{OWN}=2", 2), (f"{DEPRECATED}=2", 2), (f"{DEPRECATED}=1 {OWN}=4", 4), (f"{DEPRECATED}=2 {OWN}=4", 2)],
)
def test_deprecated_sp_size_wins_above_one_but_not_for_critics(config_of, settings, size) -> None:
    config = config_of(f"{settings} critic.fsdp.{SP}=2 critic.{SP}=4")
    assert [engine_of(config, role).sp_size for role in (ACTOR, "critic")] == [size, 2]
