"""verl's fused kernels in place of the head give the numbers of every row alone, or are refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from make_models_table import FUSED, read_record

from tests.architectures.outcome import EXACT, HYBRIDS, supports_checkpointing
from tests.architectures.test_every_model import SAMPLES, SEED, ZERO_GRADIENTS, without
from tests.architectures.tiny_configs import tiny_config
from tests.mixers import hybrids
from tests.mixers import test_engine as multimodal
from tests.mixers.test_engine import SAMPLES as HYBRID_SAMPLES
from tests.mixers.test_engine import assert_exact, rows_alone
from tests.support import actor_loss, assert_same, make_engine, run_engine, run_reference
from verl_pg_plugin.architectures import fused_obstacle, skeleton
from verl_pg_plugin.synthetic import make_batch

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.slow]

RECORD = read_record(Path(__file__).parents[2]).get(transformers.__version__, {})
TYPES = [name for name, outcome in RECORD.items() if outcome["status"] == EXACT and name not in HYBRIDS]
FUSED_HEAD = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}


@pytest.mark.parametrize("model_type", TYPES)
def test_fused_kernels_are_exact_or_refused_by_name(
    model_type: str, tmp_path: Path, record_property, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(SEED)
    config = tiny_config(model_type)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    obstacle = fused_obstacle(skeleton(tiny_config(model_type).get_text_config()))
    settings = {**FUSED_HEAD, "enable_gradient_checkpointing": supports_checkpointing(model_type)}
    if obstacle:
        with pytest.raises(ValueError, match=rf"use_fused_kernels=True: {re.escape(obstacle)} \(fix: .*=False"):
            make_engine(str(tmp_path), packed=True, model=settings)
    else:
        batch, zero = make_batch(SAMPLES), ZERO_GRADIENTS.get(model_type, set())
        engine = make_engine(str(tmp_path), packed=True, model=settings)
        assert engine.log_prob_head.fused is not None
        got, want = run_engine(engine, batch, actor_loss()), run_reference(str(tmp_path), batch, actor_loss())
        assert_same(without(got, zero), without(want, zero))
    record_property("transformers", transformers.__version__)
    record_property("model", json.dumps({model_type: {FUSED: not obstacle}}))


@pytest.mark.parametrize("kind", hybrids.KINDS)
def test_fused_kernels_of_hybrids_are_as_exact_as_their_layers(kind: str, tmp_path: Path, record_property) -> None:
    path = hybrids.save_hybrid(tmp_path, kind)
    engine = make_engine(path, packed=True, model=FUSED_HEAD)
    assert engine.log_prob_head.fused is not None
    assert_exact(run_engine(engine, make_batch(HYBRID_SAMPLES), actor_loss()), rows_alone(path, kind))
    record_property("transformers", transformers.__version__)
    record_property("model", json.dumps({kind: {FUSED: True}}))


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_fused_kernels_of_multimodal_hybrids_are_as_exact_as_their_layers(
    kind: str, tmp_path: Path, record_property
) -> None:
    path = hybrids.save_multimodal(tmp_path, kind)
    engine = make_engine(path, packed=True, model=FUSED_HEAD)
    assert engine.log_prob_head.fused is not None
    got = run_engine(engine, make_batch(multimodal.TEXTS), actor_loss())
    assert_same(got, multimodal.reference(path), tolerance=2e-5)
    record_property("transformers", transformers.__version__)
    record_property("model", json.dumps({kind: {FUSED: True}}))
