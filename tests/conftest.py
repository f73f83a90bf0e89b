"""Platform and process group of the test process, and a critic's checkpoint."""

import gc
import os
import socket
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")  # verl reads it at import


def pytest_collection_finish() -> None:
    """Exclude the million objects of imports from later garbage collections, which saves 0.5 s each."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def process_group() -> None:
    """For tests without ``make_engine``."""
    from tests.support import join_group_of_one  # imports verl

    join_group_of_one()


@pytest.fixture
def local_ray() -> Iterator[None]:
    import ray

    from tests.fresh import python

    started = {"include_dashboard": False, "_system_config": {"prestart_worker_first_driver": False}}
    ray.init("local", num_cpus=16, runtime_env={"py_executable": python()}, **started)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def value_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.support import save_value_model  # imports verl

    return save_value_model(tmp_path_factory.mktemp("value"))
