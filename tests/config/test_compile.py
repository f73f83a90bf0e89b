"""Layers compile by default if their type was tested on a GPU; otherwise one reason is given."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._dynamo import config

from tests.modalities.tiny_vision import KINDS
from verl_pg_plugin.config import compile as under_test
from verl_pg_plugin.config.compile import WRONG_COMPILED, compiler_obstacle, layer_compilation
from verl_pg_plugin.config.mode import Engine
from verl_pg_plugin.config.rules import compiler
from verl_pg_plugin.tested import COMPILED_TYPES


def engine(device: str = "cuda", config: Any = None, model: Any = None, **hf_config: Any) -> Engine:
    """Build the engine settings of a packed Qwen3 on a GPU, with the given changes."""
    flags = {"strategy": "fsdp2", "use_prefix_grouper": True, "prefix_grouper": {"compile_layers": "auto"}}
    checkpoint = SimpleNamespace(**({"model_type": "qwen3", "auto_map": None} | hf_config))
    model = {"use_remove_padding": True} | (model or {})
    return Engine("actor_rollout_ref.actor", flags | (config or {}), model, device, checkpoint)


@pytest.fixture
def with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "compiler_obstacle", lambda *_: "")


@pytest.mark.usefixtures("with_compiler")
def test_auto_compiles_types_tested_on_a_gpu_and_settings_are_followed() -> None:
    for strategy in ("fsdp2", "fsdp"):
        compilation = layer_compilation(engine(config={"strategy": strategy, "wrap_policy": {"min_num_params": 0}}))
        assert compilation == (True, "++prefix_grouper.compile_layers=auto: qwen3 ran compiled on a GPU")
    for setting in (True, False):
        config = {"prefix_grouper": {"compile_layers": setting}}
        assert layer_compilation(engine("cpu", config)) == (setting, f"++prefix_grouper.compile_layers={setting}")
        _, why = layer_compilation(engine(config=config, model_type="jetmoe"))
        assert ("have not been tested compiled" in why) == setting


OWN = {"AutoModelForCausalLM": "modeling.Own"}
FSDP1 = {"strategy": "fsdp"}
LEFT_ALONE: list[tuple[dict[str, Any], str, bool]] = [
    # change, part of the reason, whether True would compile
    ({"model": {"use_remove_padding": False}}, "padded groups", False),
    ({"config": FSDP1, "model": {"lora_rank": 8}}, "each LoRA adapter as an FSDP unit", False),
    ({"model_type": "apertus"}, "are 1e-4 off in a log-prob", False),
    ({"config": FSDP1 | {"use_orig_params": True}, "model": {"lora_rank": 8}}, "with LoRA", True),
    ({"config": FSDP1 | {"wrap_policy": {"min_num_params": 1000}}}, "a wrap_policy", True),
    ({"config": {"strategy": "veomni"}}, "on VeOmni has not been measured", True),
    ({"config": {"strategy": "veomni", "router_replay": {"mode": "R3"}}}, "router replay passes each", False),
    ({"device": "cpu"}, "this device is cpu", True),
    ({"auto_map": OWN, "model": {"trust_remote_code": True}}, "its own model class", True),
    ({"model": {"use_liger": True}}, "Liger", True),
    ({"config": {"qat": {"enable": True}}}, "quantization-aware training (qat)", True),
    ({"model_type": "jetmoe"}, "jetmoe have not been tested compiled on a GPU", True),
]


@pytest.mark.usefixtures("with_compiler")
@pytest.mark.parametrize(("changed", "why", "true_compiles"), LEFT_ALONE)
def test_auto_does_not_compile_and_gives_the_reason(changed, why, true_compiles) -> None:
    compiles, reason = layer_compilation(engine(**changed))
    assert not compiles
    assert why in reason
    assert ("++prefix_grouper.compile_layers=True compiles" in reason) == true_compiles


def test_auto_compiled_types_passed_on_a_gpu() -> None:
    record = (Path(__file__).parents[2] / "docs/data/gpu_tests_one_h200.csv").read_text()
    ran = set(re.findall(r"test_compiled_types_are_as_exact_as_stock_rmpad\[(\w+)\],passed", record))
    assert ran | set(KINDS) >= COMPILED_TYPES, "those with images run in one test"
    assert not COMPILED_TYPES & WRONG_COMPILED.keys()


def test_fsdp1_needs_a_torch_that_compiles_flat_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch ignores an unknown flag, which would leave layers uncompiled without notice."""
    auto, true = (engine("cpu", FSDP1 | {"prefix_grouper": {"compile_layers": of}}) for of in ("auto", True))
    assert compiler_obstacle("cpu", flat_parameters=True) == ""
    assert [*compiler(auto), *compiler(true)] == []
    monkeypatch.setattr(under_test, "WHOLE", "_no_such_flag")
    assert [issue.fix for issue in compiler(true)] == ["++prefix_grouper.compile_layers=False"]
    compiles, why = layer_compilation(auto)
    assert not compiles
    assert "++prefix_grouper.compile_layers=auto: this torch does not read _no_such_flag of FSDP1 layers" in why


def test_machines_that_cannot_compile_are_refused(monkeypatch) -> None:
    for setting, why in (("disable", "is switched off"), ("suppress_errors", "would hide failures")):
        with config.patch(setting, True):
            assert why in compiler_obstacle("cpu")
    there = under_test.importlib.util.find_spec("torch")
    monkeypatch.setattr(under_test.importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in compiler_obstacle("cuda")
    monkeypatch.setattr(under_test.importlib.util, "find_spec", lambda name: there)
    monkeypatch.setattr(under_test.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert "Triton needs a C compiler and does not find gcc or clang" in compiler_obstacle("cuda")
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "no-such-compiler")
    assert "does not find no-such-compiler" in compiler_obstacle("cpu")
    assert "does not find no-such-compiler: install gcc" in compiler_obstacle("cuda")
