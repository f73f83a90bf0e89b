"""Carried groups in other models, with adapters, value heads and a temperature for each sample."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.carried_cases import MIXED, carry_always, carrying, carrying_engine
from tests.engine.value_models import (
    critic_batch,
    critic_loss,
    make_value_engine,
    run_value_reference,
    save_value_model,
)
from tests.options.harness import LORA_RANK, save_adapter
from tests.support import actor_loss, assert_same, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

BATCH = make_batch(MIXED, max_token_len_per_gpu=56)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"))


def assert_exact(engine: Any, path: str, **reference: Any) -> None:
    with carrying(engine):
        result = run_engine(engine, BATCH, actor_loss())
    assert_same(result, run_reference(path, BATCH, actor_loss(), **reference))


def test_sliding_windows_reach_back_into_carried_rows(tmp_path: Path) -> None:
    window = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3}
    path = save_tiny_model(tmp_path, **window)
    assert_exact(carrying_engine(path), path)


def test_adapters_get_the_gradient_of_all_parts(qwen3: str, tmp_path: Path) -> None:
    adapter = save_adapter(qwen3, tmp_path)
    lora = {"lora_rank": LORA_RANK, "lora_alpha": 8, "target_modules": "all-linear", "lora_adapter_path": adapter}
    assert_exact(carrying_engine(qwen3, model=lora), qwen3, adapter=adapter)


def test_samples_of_different_temperature_do_not_share_carried_rows(qwen3: str) -> None:
    batch = make_batch(MIXED, max_token_len_per_gpu=56)
    batch["temperature"] = torch.tensor([1.0, 0.7] * len(MIXED))[: len(MIXED)]
    expected = run_reference(qwen3, batch, actor_loss())
    assert_same(run_engine(carrying_engine(qwen3), batch, actor_loss()), expected)


def test_values_of_carried_rows_reach_the_critic(tmp_path: Path) -> None:
    path = save_value_model(tmp_path)
    engine = make_value_engine(path)
    carry_always(engine)
    batch = critic_batch(MIXED, max_token_len_per_gpu=56)
    assert_same(run_engine(engine, batch, critic_loss()), run_value_reference(path, batch))
