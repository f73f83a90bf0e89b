"""Layers are compiled by default wherever that is tested, and nowhere else; one reason says which."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from torch._dynamo import config
from torch._inductor.cpp_builder import cpp_compiler_search
from torch._inductor.exc import InvalidCxxCompiler

from verl_pg_plugin.architectures.compiled_types import BREAKING_TYPES, COMPILED_TYPES, NOT_ON_GPU, ON_CPU_ALONE
from verl_pg_plugin.config import Mode
from verl_pg_plugin.config import layer_compiler as under_test
from verl_pg_plugin.config.facts import Facts, Role
from verl_pg_plugin.config.layer_compiler import CompilerFacts, asks_to_compile, compiler_obstacle, decide

PROVEN = CompilerFacts(mode=Mode.PACKED, device="cuda", model_type="qwen3")
FORBIDDING: list[tuple[dict[str, Any], str]] = [
    ({"mode": Mode.PADDED_GROUPS}, "padded groups"),
    ({"strategy": "fsdp", "flat_parameters": True}, "flat parameters"),
    ({"compiler": "no gcc"}, "no gcc"),
]
UNTESTED: list[tuple[dict[str, Any], str]] = [
    ({"device": "cpu"}, "this device is cpu"),
    ({"model_type": "own"}, "own have not been tested"),
    ({"own_class": True}, "a model class of its own"),
    ({"strategy": "fsdp"}, "strategy=fsdp"),
    ({"liger": True}, "Liger"),
    ({"tiled_mlp": True}, "tiled MLP"),
    ({"model_type": "granitemoe"}, "granitemoe have been tested on a CPU only"),
]


def test_auto_compiles_what_is_tested() -> None:
    decision = decide("auto", PROVEN)
    assert decision.on
    assert "qwen3 on cuda" in decision.reason


@pytest.mark.parametrize(("changed", "why"), [*FORBIDDING, *UNTESTED])
def test_auto_leaves_alone_what_is_not_and_says_why(changed: dict[str, Any], why: str) -> None:
    decision = decide("auto", replace(PROVEN, **changed))
    assert not decision.on
    assert why in decision.reason


@pytest.mark.parametrize(("changed", "forbids"), [(FORBIDDING[2][0], True), (UNTESTED[0][0], False)])
def test_the_override_is_named_where_it_would_work(changed: dict[str, Any], forbids: bool) -> None:
    reason = decide("auto", replace(PROVEN, **changed)).reason
    assert ("prefix_grouper.compile_layers=True compiles" in reason) != forbids


def test_what_forbids_comes_before_what_is_untested() -> None:
    assert "flat parameters" in decide("auto", replace(PROVEN, **FORBIDDING[1][0], device="cpu")).reason


@pytest.mark.parametrize("facts", [PROVEN, replace(PROVEN, device="cpu", model_type="own")])
def test_true_and_false_are_what_the_user_says(facts: CompilerFacts) -> None:
    assert decide(True, facts).on
    assert not decide(False, facts).on


def test_no_type_is_both_tested_and_known_to_break() -> None:
    assert not COMPILED_TYPES & BREAKING_TYPES.keys()
    assert NOT_ON_GPU.keys() < COMPILED_TYPES
    for model_type in BREAKING_TYPES:
        assert f"compiled layers of {model_type} " in decide("auto", replace(PROVEN, model_type=model_type)).reason


def test_the_reason_says_where_a_type_was_tested() -> None:
    assert COMPILED_TYPES - NOT_ON_GPU.keys() > ON_CPU_ALONE
    for model_type, device in {"qwen3": "cuda", **dict.fromkeys(ON_CPU_ALONE, "a CPU")}.items():
        assert decide("auto", replace(PROVEN, model_type=model_type)).reason.endswith(
            f"tested with {model_type} on {device}"
        )


@pytest.mark.parametrize(("asked", "insists"), [(True, True), ("auto", False), (False, False), (None, False)])
def test_only_true_insists(asked: Any, insists: bool) -> None:
    assert asks_to_compile(asked) == insists


def test_facts_of_a_run_are_read_from_its_config(make_config) -> None:
    """The critic's own sections decide for the critic."""
    settings = {
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.model.use_liger": True,
        "critic.strategy": "fsdp",
    }
    run = make_config(Mode.PACKED, settings)
    actor, critic = (CompilerFacts.of(Facts.from_hydra(run, role)) for role in (Role.ACTOR, Role.CRITIC))
    assert (actor.strategy, actor.flat_parameters, actor.liger, actor.model_type) == ("fsdp2", False, True, None)
    assert (critic.strategy, critic.flat_parameters, critic.liger) == ("fsdp", True, False)


@pytest.mark.parametrize(
    ("device", "missing", "why"),
    [("cuda", "triton", "needs Triton"), ("cuda", "gcc", "C compiler"), ("cpu", "g++", "C++ compiler")],
)
def test_a_missing_compiler_is_found_without_compiling(monkeypatch, device: str, missing: str, why: str) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    there = {"gcc": "/usr/bin/gcc", "clang": None, "g++": "/usr/bin/g++", "clang++": "/usr/bin/clang++", missing: None}
    monkeypatch.setattr(under_test.shutil, "which", there.get)
    monkeypatch.setattr(under_test.importlib.util, "find_spec", lambda name: None if name == missing else object())
    assert why in compiler_obstacle(device)


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("no-such-compiler", "does not find CXX='no-such-compiler': correct it"),
        ("no-such-cache g++", "does not find CXX='no-such-cache g++'"),
        ("env g++", "runs CXX='env g++' as the name of one program"),
        ("", "does not find CXX=''"),
    ],
)
def test_a_compiler_that_is_named_and_that_torch_cannot_start_is_missing(monkeypatch, named: str, why: str) -> None:
    monkeypatch.setenv("CXX", named)
    assert why in compiler_obstacle("cpu")
    with pytest.raises((InvalidCxxCompiler, OSError)):
        cpp_compiler_search((named,))


def test_a_compiler_that_is_named_is_enough(monkeypatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    assert compiler_obstacle("cpu") == ""


@pytest.mark.parametrize(("name", "why"), [("disable", "switched off"), ("suppress_errors", "hide failures")])
def test_a_torch_that_would_not_compile_or_not_tell_is_an_obstacle(name: str, why: str) -> None:
    with config.patch(name, True):
        assert why in compiler_obstacle("cpu")
