"""Every causal language model of transformers is exact through the engine, or refused by name."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from tests.architectures.outcome import EXACT, HYBRIDS, NOT_RUN, outcome_of, record_outcome, supports_checkpointing
from tests.architectures.tiny_configs import MODEL_TYPES, tiny_config
from tests.engine.test_exactness import CASES
from tests.engine.value_models import critic_batch, critic_loss, make_value_engine, run_value_reference
from tests.support import Result, actor_loss, assert_same, group, make_engine, run_engine, run_reference
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = [
    *group(10, [5, 2], 1),
    *CASES["multi_turn_branches_three_deep"],
]
SEED = 1
"""Of the weights. With 0, the sum that is the gradient of one number of Apertus' activation cancels almost, and stock
float32 itself is 1.6e-5 off float64."""
ZERO_GRADIENTS = {
    # Without rotary embedding a bias of the keys adds the same number to all scores of a query: softmax ignores it.
    "opt": {f"model.decoder.layers.{layer}.self_attn.k_proj.bias" for layer in range(2)},
}


@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in HYBRIDS])
def test_exact_through_the_engine_or_refused_by_name(model_type: str, tmp_path: Path, record_property: Any) -> None:
    expected = outcome_of(model_type)
    if expected.status == NOT_RUN:
        with pytest.raises((AttributeError, StrictDataclassError)):
            transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type))
    if expected.status == EXACT:
        engine = engine_of(model_type, tmp_path, {"logits_chunk_size": 5})
        assert (engine.log_prob_head is not None) == expected.head_in_chunks
        assert_exact(engine, model_type, tmp_path)
        if expected.value_head:
            assert_critic_is_exact(model_type, tmp_path / "value")
    record_outcome(record_property, model_type)


def save_causal(folder: Path, model_type: str) -> str:
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    model.save_pretrained(folder)
    return str(folder)


def engine_of(model_type: str, folder: Path, engine: dict | None = None, model: dict | None = None) -> Any:
    """Of a tiny model, written into ``folder``, with gradient checkpointing wherever there is any."""
    checkpointing = {"enable_gradient_checkpointing": supports_checkpointing(model_type)}
    return make_engine(
        save_causal(folder, model_type), packed=True, engine=engine, model={**checkpointing, **(model or {})}
    )


def assert_exact(engine: Any, model_type: str, folder: Path, samples: Sequence[Sample] = SAMPLES) -> None:
    """Log-probs, entropies, squared probabilities where the head computes them, and gradients."""
    batch = make_batch(samples, calculate_sum_pi_squared=engine.log_prob_head is None or not engine.log_prob_head.fused)
    actual, expected = run_engine(engine, batch, actor_loss()), run_reference(str(folder), batch, actor_loss())
    zero = ZERO_GRADIENTS.get(model_type, set())
    assert_same(without(actual, zero), without(expected, zero))
    for name in zero:
        largest = expected.gradients[name.replace("bias", "weight")].abs().max()
        assert actual.gradients[name].abs().max() <= 1e-5 * largest


def assert_critic_is_exact(model_type: str, folder: Path) -> None:
    torch.manual_seed(SEED)
    config = tiny_config(model_type, num_labels=1)
    transformers.AutoModelForTokenClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    batch = critic_batch(SAMPLES)
    batch["returns"] = batch["returns"] + 2  # above all values, or what adds up to the bias's gradient cancels
    engine = make_value_engine(str(folder))
    assert_same(run_engine(engine, batch, critic_loss()), run_value_reference(str(folder), batch))


def without(result: Result, names: set[str]) -> Result:
    return replace(result, gradients={name: grad for name, grad in result.gradients.items() if name not in names})
