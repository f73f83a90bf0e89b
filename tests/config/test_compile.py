"""Layers are compiled by default where their type ran so on a GPU; one reason says why not."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._dynamo import config

from tests.modalities.tiny_vision import KINDS
from verl_pg_plugin.config import compile as under_test
from verl_pg_plugin.config.compile import COMPILED_TYPES, WRONG_COMPILED, compiler_obstacle, layer_compilation
from verl_pg_plugin.config.mode import Engine
from verl_pg_plugin.config.rules import compiler


def engine(device: str = "cuda", config: Any = None, model: Any = None, **hf_config: Any) -> Engine:
    """A packed Qwen3 on a GPU, but for what is given."""
    flags = {"strategy": "fsdp2", "use_prefix_grouper": True, "prefix_grouper": {"compile_layers": "auto"}}
    checkpoint = SimpleNamespace(**({"model_type": "qwen3", "auto_map": None} | hf_config))
    model = {"use_remove_padding": True} | (model or {})
    return Engine("actor_rollout_ref.actor", flags | (config or {}), model, device, checkpoint)


@pytest.fixture
def compiler_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "compiler_obstacle", lambda *asked: "")


@pytest.mark.usefixtures("compiler_is_there")
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_auto_compiles_a_type_that_ran_so_on_a_gpu(strategy: str) -> None:
    assert layer_compilation(engine(config={"strategy": strategy, "wrap_policy": {"min_num_params": 0}})) == (
        True,
        "++prefix_grouper.compile_layers=auto: qwen3 ran compiled on a GPU",
    )


OWN = {"AutoModelForCausalLM": "modeling.Own"}
FSDP1 = {"strategy": "fsdp"}
LEFT_ALONE: list[tuple[dict[str, Any], str, bool]] = [
    # what is changed, part of the reason, whether True would compile
    ({"model": {"use_remove_padding": False}}, "padded groups", False),
    ({"config": FSDP1, "model": {"lora_rank": 8}}, "each LoRA adapter as an FSDP unit", False),
    ({"model_type": "apertus"}, "are 1e-4 off in a log-prob", False),
    ({"config": FSDP1 | {"use_orig_params": True}, "model": {"lora_rank": 8}}, "with LoRA", True),
    ({"config": FSDP1 | {"wrap_policy": {"min_num_params": 1000}}}, "a wrap_policy", True),
    ({"config": {"strategy": "veomni"}}, "VeOmni's models on a GPU", True),
    ({"config": {"strategy": "veomni", "router_replay": {"mode": "R3"}}}, "router replay passes each", False),
    ({"device": "cpu"}, "this device is cpu", True),
    ({"auto_map": OWN, "model": {"trust_remote_code": True}}, "its own model class", True),
    ({"model": {"use_liger": True}}, "Liger", True),
    ({"config": {"qat": {"enable": True}}}, "quantization-aware training (qat)", True),
    ({"model_type": "jetmoe"}, "jetmoe have not been tested compiled on a GPU", True),
    ({"model_type": "a_new_type"}, "a_new_type have not been tested compiled on a GPU", True),
]


@pytest.mark.usefixtures("compiler_is_there")
@pytest.mark.parametrize(("changed", "why", "true_compiles"), LEFT_ALONE)
def test_auto_leaves_alone_what_speaks_against_it_and_says_why(changed, why, true_compiles) -> None:
    compiles, reason = layer_compilation(engine(**changed))
    assert not compiles
    assert why in reason
    assert ("++prefix_grouper.compile_layers=True compiles" in reason) == true_compiles


@pytest.mark.usefixtures("compiler_is_there")
@pytest.mark.parametrize("asked", [True, False])
def test_true_and_false_are_what_the_user_says(asked: bool) -> None:
    on_a_cpu = engine("cpu", {"prefix_grouper": {"compile_layers": asked}})
    assert layer_compilation(on_a_cpu) == (asked, f"++prefix_grouper.compile_layers={asked}")
    unsure = engine(config={"prefix_grouper": {"compile_layers": asked}}, model_type="jetmoe")
    assert ("have not been tested compiled" in layer_compilation(unsure)[1]) == asked


def test_every_type_that_auto_compiles_ran_so_on_a_gpu() -> None:
    record = (Path(__file__).parents[2] / "docs/data/gpu_tests_one_h200.csv").read_text()
    ran = set(re.findall(r"test_compiled_types_are_as_exact_as_stock_rmpad\[(\w+)\],passed", record))
    assert ran | set(KINDS) >= COMPILED_TYPES, "those with images run in one test"
    assert not COMPILED_TYPES & WRONG_COMPILED.keys()


def test_machine_whose_torch_compiles_nothing_or_hides_failures_is_told() -> None:
    for setting, why in (("disable", "is switched off"), ("suppress_errors", "would hide failures")):
        with config.patch(setting, True):
            assert why in compiler_obstacle("cpu")


@pytest.mark.parametrize("asked", ["auto", True])
def test_machine_whose_torch_asks_nothing_of_flat_parameters_compiles_none_of_them(asked, monkeypatch) -> None:
    """A flag that torch does not read would leave layers uncompiled without a word."""
    fsdp1 = engine("cpu", FSDP1 | {"prefix_grouper": {"compile_layers": asked}})
    assert compiler_obstacle("cpu", flat_parameters=True) == ""
    assert [*compiler(fsdp1)] == []
    monkeypatch.setattr(under_test, "WHOLE", "_no_such_flag")
    assert "does not read _no_such_flag of FSDP1 layers" in compiler_obstacle("cpu", flat_parameters=True)
    if asked == "auto":
        compiles, why = layer_compilation(fsdp1)
        assert not compiles
        assert "++prefix_grouper.compile_layers=auto: this torch does not read" in why
    else:
        assert [issue.fix for issue in compiler(fsdp1)] == ["++prefix_grouper.compile_layers=False"]


def test_machine_without_triton_or_a_compiler_compiles_nothing(monkeypatch) -> None:
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
