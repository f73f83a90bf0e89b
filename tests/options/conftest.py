"""What the tests of options share."""

from collections.abc import Callable

import pytest

from tests.options.harness import Checkpoint, Engines
from tests.options.option import Case


@pytest.fixture(autouse=True)
def _names_of_options(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Write into the results which options a test runs, for scripts/make_support_table.py."""
    parameters = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    for case in parameters:
        if isinstance(case, Case):
            for option in case.options:
                record_property("option", option.name)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def engines(checkpoint: Checkpoint, process_group: None) -> Engines:
    return Engines(checkpoint)
