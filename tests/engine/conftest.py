"""Fixtures for tests of engines."""

from typing import Any

import pytest

from tests.support import make_engine, save_tiny_model


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def packed(qwen3: str) -> Any:
    """An engine in packed mode, whose weights no test changes."""
    return make_engine(qwen3)
