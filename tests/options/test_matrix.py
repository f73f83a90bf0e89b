"""Every option alone, and every two that meet in the code: exact against each sequence alone.

The quick tests have many pairs in one case; the slow ones run each by itself, which tells who is to blame.
"""

from functools import partial

import pytest
import torch

from tests.options.harness import Engines, assert_exact, batch_of, loss_of
from tests.options.option import Case, Place, alone, covering, pairs
from tests.options.table import BUDGET, DEFAULT, OPTIONS, SAMPLES, case_of
from tests.support import (
    assert_same,
    check_exact,
    critic_batch,
    make_engine,
    run_engine,
    split_always,
)

ON_ONE_PROCESS = [option for option in OPTIONS if option.num_ranks == 1 and not option.needs_gpu]
QUICK = [option for option in ON_ONE_PROCESS if not option.compiles]
# verl gives peft the task of a causal LM, which it cannot put adapters for on a token classifier.
OF_CRITICS = [option for option in QUICK if option.name != "LoRA" and option.meets - {Place.HEAD}]


@pytest.mark.parametrize("case", alone(QUICK), ids=str)
def test_option_keeps_the_numbers(case: Case, engines: Engines) -> None:
    assert_exact(case, engines)


def test_compiled_entropy_keeps_the_numbers(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor takes half a minute, for the slow pairs; compiled layers have tests/engine/test_compiled_layers.py."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    assert_exact(case_of("compiled entropy"), Engines(engines.checkpoint))


@pytest.mark.parametrize("case", covering(pairs(QUICK)), ids=str)
def test_many_options_together_keep_the_numbers(case: Case, engines: Engines) -> None:
    assert_exact(case, engines)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairs(ON_ONE_PROCESS), ids=str)
def test_two_options_keep_the_numbers(case: Case, engines: Engines) -> None:
    assert_exact(case, engines)


@pytest.mark.parametrize("case", pairs(ON_ONE_PROCESS, refused=True), ids=str)
def test_two_options_that_exclude_each_other_are_refused(case: Case, engines: Engines) -> None:
    with pytest.raises(ValueError, match=r"use_fused_kernels=True.*use_fused_kernels=False"):
        run_engine(engines.of(case), batch_of(case), loss_of(case))


def test_another_attention_implementation_is_replaced_too(engines: Engines) -> None:
    model = {"override_config": {"attn_implementation": "flex_attention"}}
    batch, loss = batch_of(DEFAULT), loss_of(DEFAULT)
    assert_same(run_engine(engines.of(DEFAULT, model=model), batch, loss), engines.reference_of(DEFAULT, batch))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("case", covering(pairs(OF_CRITICS)), ids=str)
def test_options_that_are_not_about_the_head_keep_values_of_critics(case: Case, value_model: str) -> None:
    settings = {"max_token_len_per_gpu": BUDGET, **case.settings("batch")}
    engine = make_engine(value_model, model=case.settings("model"), engine=case.settings("engine"), critic=True)
    if case.splits:
        split_always(engine)
    batch = {name: value for name, value in settings.items() if not isinstance(value, torch.Tensor)}
    check_exact(engine, value_model, critic_batch(SAMPLES, **batch))
