"""verl's fused kernels in place of the head give the numbers of every row alone, or are refused by name."""

import json
import re
from pathlib import Path

import pytest
import transformers
from make_models_table import FUSED, read_record

from tests.architectures.outcome import EXACT, HYBRIDS
from tests.architectures.test_every_model import assert_exact, engine_of
from tests.architectures.tiny_configs import tiny_config
from tests.mixers import hybrids, test_engine
from tests.support import actor_loss, assert_same, make_engine, run_engine
from verl_pg_plugin.architectures import fused_obstacle, skeleton
from verl_pg_plugin.synthetic import make_batch

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.slow]

RECORD = read_record(Path(__file__).parents[2]).get(transformers.__version__, {})
TYPES = [name for name, outcome in RECORD.items() if outcome["status"] == EXACT and name not in HYBRIDS]
FUSED_HEAD = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}


@pytest.mark.parametrize("model_type", TYPES)
def test_fused_kernels_are_exact_or_refused_by_name(model_type: str, tmp_path: Path, record_property) -> None:
    obstacle = fused_obstacle(skeleton(tiny_config(model_type).get_text_config()))
    if obstacle:
        with pytest.raises(ValueError, match=rf"use_fused_kernels=True: {re.escape(obstacle)} \(fix: .*=False"):
            engine_of(model_type, tmp_path, model=FUSED_HEAD)
    else:
        engine = engine_of(model_type, tmp_path, model=FUSED_HEAD)
        assert engine.log_prob_head.fused is not None
        assert_exact(engine, model_type, tmp_path)
    record_property("transformers", transformers.__version__)
    record_property("model", json.dumps({model_type: {FUSED: not obstacle}}))


@pytest.mark.parametrize("kind", [*hybrids.KINDS, "qwen3_5", "qwen3_5_moe"])
def test_fused_kernels_of_hybrids_are_as_exact_as_their_layers(kind: str, tmp_path: Path, record_property) -> None:
    text_alone = kind in hybrids.KINDS
    path = (hybrids.save_hybrid if text_alone else hybrids.save_multimodal)(tmp_path, kind)
    engine = make_engine(path, packed=True, model=FUSED_HEAD)
    assert engine.log_prob_head.fused is not None
    samples = test_engine.SAMPLES if text_alone else test_engine.TEXTS
    got = run_engine(engine, make_batch(samples), actor_loss())
    if text_alone:
        test_engine.assert_exact(got, test_engine.rows_alone(path, kind))
    else:
        assert_same(got, test_engine.reference(path), tolerance=2e-5)
    record_property("transformers", transformers.__version__)
    record_property("model", json.dumps({kind: {FUSED: True}}))
