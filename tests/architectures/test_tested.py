"""``tested.py`` names what the tests of models run, and nothing else."""

from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.batches import make_batch
from make_models_table import read_record
from transformers import PretrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from tests.architectures.outcome import EXACT, outcome_of
from tests.architectures.test_every_model import SAMPLES
from tests.architectures.tiny_configs import MODEL_TYPES, save_causal, tiny_config
from tests.support import check_exact, make_engine
from verl_pg_plugin.modalities import IMAGE_MODEL_TYPES
from verl_pg_plugin.skeleton import auto_class, text_skeleton
from verl_pg_plugin.tested import EXACT_TYPES, TESTED_SWITCHES, untested_part

SWITCHED = {  # a type that has the switch, off by default
    "attention_bias": "llama",
    "mlp_bias": "llama",
    "norm_topk_prob": "qwen3_moe",
    "tie_word_embeddings": "qwen3",
    "use_qk_norm": "glm4_moe",
    "use_sliding_window": "qwen2",
}


def test_exact_types_match_the_record_and_count_as_tested() -> None:
    outcomes = [pair for of_version in read_record().values() for pair in of_version.items()]
    recorded = {model_type for model_type, outcome in outcomes if outcome["status"] == EXACT}
    assert recorded | set(IMAGE_MODEL_TYPES) == EXACT_TYPES
    exact = [name for name in MODEL_TYPES if outcome_of(name).status == EXACT]
    untested = {name: untested_part(text_skeleton(tiny_config(name))) for name in exact}
    assert not {name: part for name, part in untested.items() if part}


@pytest.mark.parametrize("switch", TESTED_SWITCHES)
def test_tested_switches_are_exact(switch: str, tmp_path: Path) -> None:
    path = save_causal(tmp_path, SWITCHED[switch], **{switch: True})
    engine = make_engine(path)
    assert not engine.verifier.enabled
    check_exact(engine, path, make_batch(SAMPLES))


def test_untested_parts_are_named() -> None:
    def why(model_type: str, **switches: object) -> str:
        return untested_part(text_skeleton(tiny_config(model_type, **switches)))

    assert why("gpt_neox", use_parallel_residual=False) == "no test runs gpt_neox with use_parallel_residual=False"
    gemma = text_skeleton(tiny_config("gemma3n_text"))
    gemma.config.num_kv_shared_layers = 1
    assert untested_part(gemma) == "no test runs gemma3n_text with num_kv_shared_layers=1"
    assert why("stablelm") == "no test runs models of type stablelm"
    own_config = text_skeleton(tiny_config("qwen3"))

    class OwnConfig(type(own_config.config)):  # type: ignore[misc]
        def __init__(self, size: int) -> None:
            super().__init__(hidden_size=size)

    own_config.config = OwnConfig(64)
    assert untested_part(own_config).startswith("no test runs the config class OwnConfig of tests.")
    with patch.object(Qwen3MLP, "forward", lambda self, x: x):
        part = "model.layers.0.mlp of Qwen3ForCausalLM is a Qwen3MLP, whose code in tests.architectures.test_tested"
        assert why("qwen3").startswith(part)
    stock = Qwen3MLP.forward
    with patch.object(Qwen3MLP, "forward", wraps(stock)(lambda self, x: stock(self, x))):
        assert why("qwen3").startswith(part)
    hooked, on_instance = (text_skeleton(tiny_config("qwen3")) for _ in range(2))
    assert untested_part(hooked) == ""
    hooked.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: args)
    on_instance.model.layers[0].mlp.forward = lambda x: x
    assert untested_part(hooked).startswith(part)
    assert untested_part(on_instance).startswith(part)


def test_text_models_of_untested_types_are_named() -> None:
    config = tiny_config("internvl")
    assert untested_part(skeleton_of(config)) == ""
    config.text_config = tiny_config("stablelm")
    assert untested_part(skeleton_of(config)) == "no test runs internvl around a text model of type stablelm"


def skeleton_of(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return auto_class(config).from_config(config)
