"""The critic takes the options that are not about the language-model head; values and gradients stay exact."""

import pytest
import torch

from tests.engine.carried_cases import carry_always
from tests.engine.value_models import check_exact_values, critic_batch, make_value_engine, save_value_model
from tests.options.option import Case, Option, Place, covering, pairs
from tests.options.table import BUDGET, OPTIONS, SAMPLES

pytestmark = pytest.mark.usefixtures("process_group")


def is_for_a_critic(option: Option) -> bool:
    runs_here = option.num_ranks == 1 and not option.needs_gpu and not option.compiles
    # verl gives peft the task of a causal LM, which it cannot put adapters for on a token classifier.
    return runs_here and option.name != "LoRA" and bool(option.meets - {Place.HEAD})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_value_model(tmp_path_factory.mktemp("value"))


@pytest.mark.parametrize("case", covering(pairs(option for option in OPTIONS if is_for_a_critic(option))), ids=str)
def test_options_together_keep_values_and_gradients(case: Case, path: str) -> None:
    settings = {"max_token_len_per_gpu": BUDGET, **case.settings("batch")}
    engine = make_value_engine(path, model=case.settings("model"), options=case.settings("engine"))
    if case.splits:
        carry_always(engine)
    batch = {name: value for name, value in settings.items() if not isinstance(value, torch.Tensor)}
    check_exact_values(engine, path, critic_batch(SAMPLES, **batch))
