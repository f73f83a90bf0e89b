"""Stock verl's rmpad carries recurrent states from sequence to sequence: shown, told, and avoided."""

import logging
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from verl_pg_plugin.cli.doctor.overrides import compose_config, settings

from tests.mixers.hybrids import config_of, save_hybrid
from tests.support import actor_loss, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin import architectures
from verl_pg_plugin.architectures import rmpad_fault
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = [*group(30, [25, 9, 1], 1), *group(3, [5, 3], 2)]
ENGINE = "verl_pg_plugin.engine.shared_prefix_engine"


def worst_log_prob(path: str, **options) -> float:
    batch = make_batch(SAMPLES)
    got, want = run_engine(make_engine(path, **options), batch, actor_loss()), run_reference(path, batch, actor_loss())
    pairs = zip(got.outputs["log_probs"], want.outputs["log_probs"], strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stock rmpad needs flash-attn there")
def test_stock_rmpad_is_wrong_and_warned_of_and_packed_mode_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_hybrid(tmp_path)
    with caplog.at_level(logging.WARNING, logger=ENGINE):
        assert worst_log_prob(path, packed=False) > 1e-2, "verl has mended it: rmpad_fault can go"
    (told,) = [record.getMessage() for record in caplog.records if "rmpad mode computes" in record.getMessage()]
    assert "qwen3_next wrongly" in told
    assert "use_prefix_grouper=True" in told
    assert worst_log_prob(path, packed=True) <= 1e-5


def test_models_without_recurrence_are_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_tiny_model(tmp_path)
    with caplog.at_level(logging.WARNING, logger=ENGINE):
        make_engine(path, packed=False)
    assert not [record for record in caplog.records if record.name == ENGINE]
    assert rmpad_fault(transformers.AutoConfig.from_pretrained(path), "cuda") is None


def test_released_checkpoints_are_not_warned_of_where_verls_forward_tells_flas_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = transformers.AutoConfig.for_model("qwen3_5", text_config=config_of("qwen3_5_text").to_dict())
    monkeypatch.setattr(architectures, "has_fla", lambda: True)
    assert rmpad_fault(released, "cuda") is None
    assert rmpad_fault(released, "cpu") is not None
    assert rmpad_fault(config_of("qwen3_5_text"), "cuda") is not None
    monkeypatch.setattr(architectures, "has_fla", lambda: False)
    assert rmpad_fault(released, "cuda") is not None


@pytest.mark.parametrize(("sharing", "problems"), [(False, 1), (True, 0)])
def test_the_doctor_tells(tmp_path: Path, sharing: bool, problems: int) -> None:
    config = config_of("qwen3_next", architectures=["Qwen3NextForCausalLM"])
    config.save_pretrained(tmp_path)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    overrides = {
        "actor_rollout_ref.model.path": tmp_path,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.actor.use_prefix_grouper": sharing,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.name": "hf",
        "algorithm.adv_estimator": "grpo",
        "trainer.device": "cpu",
    }
    found = settings(compose_config([f"{key}={value}" for key, value in overrides.items()])).problems
    assert len([problem for problem in found if "rmpad mode computes" in problem.what]) == problems
