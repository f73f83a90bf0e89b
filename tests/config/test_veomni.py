"""The VeOmni engine: the flag reaches it, and untested settings are refused in both places."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.config.config_support import CRITIC, compose_config, compose_stock
from tests.config.test_rules import assert_both_refuse, engine_configs, errors
from verl_pg_plugin.config import PrefixGrouperVeOmniEngineConfig, engine_config, rules
from verl_pg_plugin.config.engage import engage
from verl_pg_plugin.config.keys import ACTOR, MODEL, REF
from verl_pg_plugin.config.preflight import RAY_INIT, preflight
from verl_pg_plugin.issue import Issue

FLAG, KEY = f"{ACTOR}.use_prefix_grouper=True", f"{ACTOR}.veomni"

REFUSED: list[tuple[str, str, str]] = [
    # override, part of the cause, part of the fix
    (f"{KEY}.expert_parallel_size=2", "several GPUs", "=1"),
    (f"{KEY}.enable_fsdp_offload=True", "offload of weights", "=False"),
    (f"{REF}.veomni.enable_async_activation_offload=True", "prefix_grouper.activations", "=False"),
    (f"{MODEL}.lora_rank=4", "no LoRA", "lora_rank=0"),
    (f"{MODEL}.use_remove_padding=False", "padded groups", "use_remove_padding=True"),
    (f"{MODEL}.path={{models}}/gemma2", "llama, qwen2, qwen3, qwen3_moe", "model_engine=dp"),
    (f"{MODEL}.path={{models}}/qwen3_vl", "qwen3_vl on VeOmni has not been tested", "model_engine=dp"),
    (f"{KEY}.ulysses_parallel_size=3", "cannot be spread", ".veomni.ulysses_parallel_size="),
]


@pytest.fixture
def veomni_config(runnable_overrides: list[str], places: dict[str, Path]) -> Any:
    def make(*overrides: str) -> Any:
        given = [item.format(**places) for item in overrides]
        return compose_config("model_engine=veomni", *runnable_overrides, FLAG, *given)

    return make


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the package veomni is installed."""
    stub = ModuleType("veomni")
    stub.__spec__ = ModuleSpec("veomni", None)
    monkeypatch.setitem(sys.modules, "veomni", sys.modules.get("veomni", stub))
    monkeypatch.setattr(engine_config, "assert_in_force", lambda *_: None)


def test_flag_reaches_both_roles_from_both_entry_points(veomni_config, runnable_overrides: list[str]) -> None:
    stock = compose_stock("model_engine=veomni", *runnable_overrides, FLAG, "+prefix_grouper.prefix_cache=off")
    engage(stock)
    for config in (veomni_config("++prefix_grouper.prefix_cache=off"), stock):
        assert errors(config) == []
        for role in (ACTOR, REF):
            engine, _ = engine_configs(config, role)
            assert isinstance(engine, PrefixGrouperVeOmniEngineConfig)
            assert (engine.use_prefix_grouper, engine.prefix_grouper.prefix_cache) == (True, "off")
            assert engine.forward_only is (role == REF)
            # verl's FSDP loop, which ours is, defers the reduction unless a config says otherwise; VeOmni's never does.
            assert engine.use_no_sync_for_gradient_accumulation is False


@pytest.mark.parametrize(("override", "why", "fix"), REFUSED, ids=[row[0] for row in REFUSED])
def test_preflight_and_engine_refuse_the_same(override: str, why: str, fix: str, veomni_config) -> None:
    assert_both_refuse(veomni_config(override), override.partition("=")[0], why, fix)


def test_critics_other_ulysses_sizes_and_missing_groups_are_refused(veomni_config, runnable_overrides) -> None:
    both = f"{KEY}.expert_parallel_size=2", f"{KEY}.enable_fsdp_offload=True"
    fixes = {issue.setting: issue.fix for issue in errors(veomni_config(*CRITIC.split(), *both))}
    assert fixes["critic.strategy=veomni"] == "model_engine=dp"
    assert fixes.keys() >= {*both}
    one = f"{MODEL}.path={{models}}/qwen3_moe", f"++{MODEL}.override_config.num_experts_per_tok=1"
    assert "zeros mark tokens without experts" in errors(veomni_config(*one, f"{KEY}.router_replay.mode=R2"))[0].why
    (issue,) = errors(veomni_config("trainer.n_gpus_per_node=2", f"{REF}.veomni.ulysses_parallel_size=2"))
    assert "uses the size of a process's first engine" in issue.why
    assert issue.setting == f"{REF}.veomni.ulysses_parallel_size=2"
    assert issue.fix == f"{REF}.veomni.ulysses_parallel_size=1"
    ignored = f"+{ACTOR}.ulysses_sequence_parallel_size=3", f"{MODEL}.use_liger=True"  # VeOmni brings its own kernels
    assert errors(veomni_config("trainer.n_gpus_per_node=2", f"{KEY}.ulysses_parallel_size=2", *ignored)) == []
    issues = errors(compose_config(*runnable_overrides, FLAG, f"{ACTOR}.strategy=veomni"))
    assert {issue.fix for issue in issues} == {"model_engine=veomni"}


@pytest.mark.parametrize(("address", "is_warning"), [("local", False), ("auto", True)])
def test_missing_package_is_a_warning_only_on_a_cluster(address, is_warning, veomni_config, monkeypatch):
    monkeypatch.undo()  # the package and its engine are not there
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: None)
    issues = preflight(veomni_config(f"{RAY_INIT}.address={address}"))
    fix = "pip install veomni, or model_engine=dp"
    assert issues == [Issue(f"{role}.strategy=veomni", issues[0].why, fix, is_warning) for role in (ACTOR, REF)]
