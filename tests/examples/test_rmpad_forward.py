"""Removing the padding around stock transformers models leaves the logits of valid tokens as they are."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "rmpad_forward.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rmpad_forward", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_logits_are_equal_at_every_valid_token_and_only_there(model_type: str) -> None:
    rmpad = example()
    result = rmpad.compare(rmpad.build_model(model_type, "cpu"), *rmpad.build_batch("cpu"))
    valid = result.attention_mask.bool()
    assert (result.error[valid] <= 1e-5 * result.padded.abs().max()).all()
    assert (result.error[~valid] > 1e-2).all()
    assert (result.repadded[~valid] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_on_a_gpu_the_difference_is_that_of_the_dtype(model_type: str) -> None:
    rmpad = example()
    model = rmpad.build_model(model_type, "cuda")
    result = rmpad.compare(model, *rmpad.build_batch("cuda"))
    valid = result.attention_mask.bool()
    bound = (2**-7 if model.dtype == torch.bfloat16 else 1e-5) * result.padded.abs().max()
    assert (result.error[valid] <= bound).all()
    assert (result.error[~valid] > bound).all()


def test_the_example_runs_without_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    example().main()
    said = capsys.readouterr().out
    assert "Qwen2.5" in said
    assert "Qwen3" in said
