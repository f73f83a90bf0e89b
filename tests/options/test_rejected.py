"""What packed mode does not support is refused by name when the engine is built, with the way out."""

import pytest

from tests.options.harness import Checkpoint
from tests.options.option import Case
from tests.options.table import OPTIONS
from tests.support import make_engine

pytestmark = pytest.mark.usefixtures("process_group")

REFUSED_BY_ENGINE = [Case((option,)) for option in OPTIONS if option.rejected and not option.is_default]
"""The others never reach an engine: tests/config/test_rules.py."""


@pytest.mark.parametrize("case", REFUSED_BY_ENGINE, ids=str)
def test_rejected_option_is_named_with_the_way_out(case: Case, checkpoint: Checkpoint) -> None:
    (option,) = case.options
    name = option.override.partition("=")[0].rpartition(".")[2]
    with pytest.raises(ValueError, match=rf"{name}=.*set .*use_prefix_grouper=False"):
        make_engine(checkpoint.model, packed=True, engine=case.settings("engine"), model=case.settings("model"))
