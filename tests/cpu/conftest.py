"""A tiny checkpoint, made once by the example's own script."""

from pathlib import Path

import pytest
from make_tiny_checkpoint import make_tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", warm_up_steps=0)


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)
