"""Fixtures for tests of options."""

import pytest

from tests.options.harness import Checkpoint, Engines


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def engines(checkpoint: Checkpoint) -> Engines:
    return Engines(checkpoint)
