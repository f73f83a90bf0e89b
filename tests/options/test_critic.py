"""The critic takes the options that are not about the language-model head; values and gradients stay exact."""

from typing import Any

import pytest
import torch
from verl.workers.engine import EngineRegistry

from tests.engine.value_models import critic_batch, critic_loss, run_value_reference, save_value_model
from tests.options.option import Case, Option, Place, alone
from tests.options.table import BUDGET, OPTIONS, SAMPLES
from tests.support import assert_same, make_engine, run_engine

pytestmark = pytest.mark.usefixtures("process_group")


def is_for_a_critic(option: Option) -> bool:
    runs_here = option.num_ranks == 1 and not option.needs_gpu and not option.compiles
    # verl gives peft the task of a causal LM, which it cannot put adapters for on a token classifier.
    return runs_here and option.name != "LoRA" and bool(option.meets - {Place.HEAD})


def make_critic(path: str, case: Case) -> Any:
    model = {"model_type": "value_model", **case.settings("model")}
    engine_cls = EngineRegistry.get_engine_cls("value_model", "fsdp2")
    return make_engine(path, packed=True, engine=case.settings("engine"), model=model, engine_cls=engine_cls)


def settings_of(case: Case) -> dict[str, Any]:
    settings = {"max_token_len_per_gpu": BUDGET, **case.settings("batch")}
    return {name: value for name, value in settings.items() if not isinstance(value, torch.Tensor)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_value_model(tmp_path_factory.mktemp("value"))


@pytest.mark.parametrize("case", alone(option for option in OPTIONS if is_for_a_critic(option)), ids=str)
def test_option_keeps_values_and_gradients(case: Case, path: str) -> None:
    batch = critic_batch(SAMPLES, **settings_of(case))
    result = run_engine(make_critic(path, case), batch, critic_loss())
    assert_same(result, run_value_reference(path, batch))
