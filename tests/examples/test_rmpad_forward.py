"""Removing the padding around stock transformers models leaves the logits of valid tokens as they are."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "rmpad_forward.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rmpad_forward", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_logits_are_equal_at_every_valid_token_and_only_there(model_type: str, device: str) -> None:
    rmpad = example()
    model = rmpad.build_model(model_type, device)
    result = rmpad.compare(model, *rmpad.build_batch(device))
    valid = result.attention_mask.bool()
    bound = (2**-7 if model.dtype == torch.bfloat16 else 1e-5) * result.padded.abs().max()
    assert (result.error[valid] <= bound).all()
    assert (result.error[~valid] > max(bound, 1e-2)).all()
    assert (result.repadded[~valid] == 0).all()


def test_the_example_runs_without_arguments(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    example().main()
    assert {"Qwen2.5", "Qwen3"} <= set(re.findall(r"Qwen[\d.]+", capsys.readouterr().out))
