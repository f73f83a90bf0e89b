"""Removing the padding around stock transformers models leaves the logits of valid tokens as they are."""

import re
import sys

import pytest
import rmpad_forward
import torch


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_valid_tokens_have_equal_logits(model_type: str, device: str) -> None:
    model = rmpad_forward.build_model(model_type, device)
    result = rmpad_forward.compare(model, *rmpad_forward.build_batch(device))
    valid = result.attention_mask.bool()
    bound = (2**-7 if model.dtype == torch.bfloat16 else 1e-5) * result.padded.abs().max()
    assert (result.error[valid] <= bound).all()
    assert (result.error[~valid] > max(bound, 1e-2)).all()
    assert (result.repadded[~valid] == 0).all()


def test_example_runs_without_arguments(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["rmpad_forward.py"])
    rmpad_forward.main()
    assert {"Qwen2.5", "Qwen3"} <= set(re.findall(r"Qwen[\d.]+", capsys.readouterr().out))
