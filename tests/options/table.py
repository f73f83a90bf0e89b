"""Every option of the support table, in its order, and the batch that the matrix runs it on."""

from tests.engine.test_exactness import MIXED
from tests.options.batch_options import BATCH_OPTIONS
from tests.options.model_options import MODEL_OPTIONS
from tests.options.option import Case, Option
from tests.options.rejected_options import REJECTED_OPTIONS
from tests.options.run_options import RUN_OPTIONS
from tests.options.weight_options import WEIGHT_OPTIONS
from tests.support import group

SAMPLES = [*MIXED, *group(11, [6], 9)]
"""Uneven groups of 4, 2, 1 and 1."""
BUDGET = 60
"""Tokens of a micro-batch where no option says otherwise: the groups fall into several."""

OPTIONS: tuple[Option, ...] = (*BATCH_OPTIONS, *MODEL_OPTIONS, *WEIGHT_OPTIONS, *RUN_OPTIONS, *REJECTED_OPTIONS)


def case_of(*names: str) -> Case:
    """The options of these names together."""
    by_name = {option.name: option for option in OPTIONS}
    return Case(tuple(by_name[name] for name in names))


DEFAULT = case_of("FSDP2")
"""What every case has on already."""
