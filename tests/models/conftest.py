"""Checkpoints that the model tests share."""

import pytest

from tests.models.models import save_qwen3, save_split_llama


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3 checkpoint outside the repository, patched by ``patch-model``."""
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def split_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint assembled from two tiny Llamas of different widths."""
    return save_split_llama(tmp_path_factory.mktemp("split_llama") / "model")


@pytest.fixture(params=["qwen3", "split_llama"])
def checkpoint(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)
