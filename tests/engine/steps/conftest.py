"""What the tests of verify mode share."""

import pytest

from tests.support import save_tiny_model


@pytest.fixture(scope="package")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"))
