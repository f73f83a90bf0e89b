"""Rollout features that a run gets, and what they write into its config."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from tests.config.config_support import compose_config
from verl_pg_plugin.cli.overrides import run_lines
from verl_pg_plugin.config import rollout
from verl_pg_plugin.config.engage import engage
from verl_pg_plugin.config.rollout import engage_rollouts, num_servers, rollout_parts, summary
from verl_pg_plugin.rollout import SHARED_DECODE

ROLLOUT = "actor_rollout_ref.rollout"
BASE = (
    "actor_rollout_ref.actor.use_prefix_grouper=True",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.n=8",
    "trainer.n_gpus_per_node=8",
    "data.train_batch_size=64",
    "data.max_prompt_length=8192",
)
ROUTING, DECODE, SAMPLER = "routing by prompt", "shared decode", "no wait for the sampler"


def config_of(*overrides: str) -> Any:
    config = compose_config(*BASE, *overrides)
    engage_rollouts(config)
    return config


def off(config: Any) -> dict[str, str]:
    return {part.name: part.obstacle for part in rollout_parts(config) if part.obstacle}


def test_several_servers_get_all_parts_once() -> None:
    config = config_of()
    assert off(config) == {}
    section = OmegaConf.select(config, ROLLOUT)
    assert Path(section.router_config_path).name == "router.yaml"
    assert Path(section.router_config_path).is_file()
    assert section.engine_kwargs.vllm.additional_config == {SHARED_DECODE: True}
    assert config.trainer.v1.sampler.custom_sampler.name == "prompt_replay_buffer"
    again = config.copy()
    engage_rollouts(again)
    assert again == config
    # verl writes a dict as JSON, and anything else as text that vLLM cannot parse.
    value = omega_conf_to_dataclass(section).engine_kwargs["vllm"]["additional_config"]
    assert isinstance(value, dict)
    assert json.loads(json.dumps(value)) == {SHARED_DECODE: True}


@pytest.mark.parametrize(
    ("override", "part", "cause"),
    [
        (f"{ROLLOUT}.router_config_path=mine.yaml", ROUTING, "mine.yaml"),
        (f"{ROLLOUT}.full_determinism=True", ROUTING, "full_determinism=True"),
        ("trainer.n_gpus_per_node=1", ROUTING, "there is one server"),
        (f"{ROLLOUT}.name=sglang", ROUTING, "it pays only with shared decode"),
        (f"{ROLLOUT}.name=sglang", DECODE, "name=sglang"),
        (f"{ROLLOUT}.full_determinism=True", DECODE, "full_determinism=True"),
        (f"{ROLLOUT}.enforce_eager=True", DECODE, "enforce_eager=True"),
        (f"{ROLLOUT}.enable_prefix_caching=False", DECODE, "enable_prefix_caching=False"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.attention_backend=FLASHINFER", DECODE, "attention_backend=FLASHINFER"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.additional_config.{SHARED_DECODE}=False", DECODE, f"{SHARED_DECODE}=False"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.enforce_eager=True", DECODE, "vllm.enforce_eager=True"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8", DECODE, "kv_cache_dtype=fp8"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode=PIECEWISE", DECODE, "PIECEWISE"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.additional_config='{{\"mine\":7}}'", DECODE, "is not a mapping"),
        (f"{ROLLOUT}.data_parallel_size=2", DECODE, "data_parallel_size=2"),
        ("data.train_batch_size=0", DECODE, "does not give the number of prompts"),
        ("data.max_prompt_length=300", DECODE, "share at most 16,800 prompt tokens"),
        ("trainer.use_v1=False", SAMPLER, "use_v1=False"),
        ("trainer.v1.sampler.custom_sampler.name=Mine", SAMPLER, "name=Mine"),
        ("trainer.v1.sampler.sync_refill_failed_groups=True", SAMPLER, "sync_refill_failed_groups=True"),
        ("algorithm.filter_groups.enable=True", SAMPLER, "filter_groups.enable=True"),
    ],
)
def test_parts_that_do_not_fit_are_left_out_with_the_cause(override: str, part: str, cause: str) -> None:
    config = compose_config(*BASE, override)
    before = config.copy()
    engage_rollouts(config)
    assert cause in off(config)[part]
    settings = next(each.settings for each in rollout_parts(config) if each.name == part)
    for key in settings:
        assert OmegaConf.select(config, key) == OmegaConf.select(before, key)


def test_user_keys_of_additional_config_are_kept() -> None:
    switch = f"+{ROLLOUT}.engine_kwargs.vllm.additional_config.{SHARED_DECODE}=True"
    assert DECODE not in off(config_of("data.max_prompt_length=300", switch))
    config = config_of(f"+{ROLLOUT}.engine_kwargs.vllm.additional_config.mine=7")
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config == {"mine": 7, SHARED_DECODE: True}


def test_unsupported_vllm_versions_decode_as_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in ("0.23.1", "0.25.1", "0.27.0"):
        monkeypatch.setattr(rollout, "version", lambda name, installed=installed: installed)
        assert f"vllm {installed}" in off(config_of())[DECODE]
    for installed in ("0.24.1", "0.26.0"):
        monkeypatch.setattr(rollout, "version", lambda name, installed=installed: installed)
        assert DECODE not in off(config_of())


def test_number_of_servers_follows_their_gpus() -> None:
    assert num_servers(config_of()) == 8
    assert num_servers(config_of("trainer.nnodes=2", f"{ROLLOUT}.tensor_model_parallel_size=4")) == 4
    assert num_servers(config_of(f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2")) == 2
    assert num_servers(config_of("trainer.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=8")) == 1


def test_off_leaves_rollouts_unchanged_and_parts_are_listed(checkpoint: Path, caplog) -> None:
    option = "++prefix_grouper.rollout=off"
    config = compose_config(*BASE, option)
    assert set(off(config).values()) == {option}
    assert OmegaConf.select(config, f"{ROLLOUT}.router_config_path") is None
    assert not config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert summary(rollout_parts(config)).startswith(f"{ROUTING} is off ({option}); {DECODE} is off")
    config = compose_config(*BASE, f"actor_rollout_ref.model.path={checkpoint}", f"{ROLLOUT}.enforce_eager=True")
    with caplog.at_level("INFO"):
        engage(config)
    line = f"{DECODE} is off ({ROLLOUT}.enforce_eager=True); {SAMPLER} is on"
    assert line in caplog.text
    assert any(line in check.text for check in run_lines(config, asks_verl=False) if check.what == "rollouts")
