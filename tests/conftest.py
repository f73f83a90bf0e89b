"""Platform and process group of the test process, and the checkpoint of a critic."""

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl is imported: its platform is chosen once


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """One rank, as verl's engines need it."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def value_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.support import save_value_model  # imports verl

    return save_value_model(tmp_path_factory.mktemp("value"))
