from collections.abc import Iterator

import pytest
import ray

from tests.fresh import python


@pytest.fixture
def local_ray() -> Iterator[None]:
    started = {"include_dashboard": False, "_system_config": {"prestart_worker_first_driver": False}}
    ray.init("local", num_cpus=16, runtime_env={"py_executable": python()}, **started)
    yield
    ray.shutdown()
