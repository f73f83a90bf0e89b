"""Qwen3.5 as it is released, a multimodal checkpoint, trains on text and keeps its class and its weights' names."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from verl.workers.engine.fsdp import transformer_impl

from tests.architectures.outcome import record_outcome
from tests.mixers.hybrids import save_multimodal
from tests.support import Result, actor_loss, assert_same, group, make_engine, run_engine, run_reference
from verl_pg_plugin.architectures import architecture_issues
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = [*group(30, [25, 9, 1, 17], 1), *group(3, [5, 3], 2)]


@pytest.fixture(scope="module")
def qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_multimodal(tmp_path_factory.mktemp("qwen3_5"))


def reference(path: str) -> Result:
    load = transformers.AutoModelForImageTextToText.from_pretrained
    with patch.object(transformers.AutoModelForCausalLM, "from_pretrained", load):
        return run_reference(path, make_batch(SAMPLES), actor_loss())


def positions_in_four_planes(batch):
    """As verl's agent loop makes them for a processor with three-dimensional positions: text, time, height, width."""
    lengths = batch["input_ids"].offsets().diff().tolist()
    planes = [torch.arange(length).expand(4, length) for length in lengths]
    batch["position_ids"] = torch.nested.as_nested_tensor(planes, layout=torch.jagged)
    return batch


def test_text_alone_is_exact_and_weights_keep_their_names(qwen3_5: str, record_property: Any) -> None:
    engine, want = make_engine(qwen3_5, packed=True), reference(qwen3_5)
    for batch in (make_batch(SAMPLES), positions_in_four_planes(make_batch(SAMPLES))):
        assert_same(run_engine(engine, batch, actor_loss()), want, tolerance=2e-5)
    names = set(engine.module.state_dict())
    assert names == set(transformers.AutoModelForImageTextToText.from_pretrained(qwen3_5).state_dict())
    assert {name.split(".")[1] for name in names if name.startswith("model.")} == {"visual", "language_model"}
    with engine.train_mode():
        engine.forward_backward_batch(make_batch(SAMPLES), actor_loss())
        assert engine.optimizer_step() > 0  # weights of the tower have no gradient
    record_outcome(record_property, "qwen3_5")


def test_the_mixture_of_experts_is_exact(tmp_path: Path, record_property: Any) -> None:
    path = save_multimodal(tmp_path, "qwen3_5_moe")
    assert_same(run_engine(make_engine(path, packed=True), make_batch(SAMPLES), actor_loss()), reference(path), 2e-5)
    record_outcome(record_property, "qwen3_5_moe")


def test_forwards_of_transformers_stay_as_they_are(qwen3_5: str) -> None:
    """verl's, which it puts into the classes for good, would drop which rows are shared."""
    model_class = transformers.Qwen3_5ForConditionalGeneration
    before, patched = model_class.forward, transformer_impl.apply_monkey_patch
    make_engine(qwen3_5, packed=True)
    assert model_class.forward is before
    assert transformer_impl.apply_monkey_patch is patched
    assert "logits_to_keep" in inspect.signature(before).parameters


def test_the_tower_costs_rows_nothing(qwen3_5: str) -> None:
    config = transformers.AutoConfig.from_pretrained(qwen3_5)
    assert architecture_issues(config, trust_remote_code=False) == []
    whole = transformers.AutoModelForImageTextToText.from_pretrained(qwen3_5)
    text = transformers.AutoModelForCausalLM.from_config(config.get_text_config())
    assert replace(ModelFlops.of(whole), tower=None) == ModelFlops.of(text) == ModelFlops.of_config(config)
