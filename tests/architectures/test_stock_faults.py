"""Models that stock rmpad on flash-attn computes wrongly are told of by name."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from make_models_table import read_record
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tests.architectures.test_record import REPOSITORY
from tests.architectures.tiny_configs import MODEL_TYPES, tiny_config
from verl_pg_plugin import architectures
from verl_pg_plugin.architectures import POSITIONS_KEPT, rmpad_fault

RECORDING = "recording"
TEXT_TYPES = sorted(
    model_type
    for model_type, outcome in read_record(REPOSITORY).get(transformers.__version__, {}).items()
    if outcome["status"] == "exact" and model_type in MODEL_TYPES and hasattr(tiny_config(model_type), "vocab_size")
)


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each attention layer of a forward with this implementation got positions."""
    seen: list[bool] = []

    def attend(module: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        seen.append(kwargs.get("position_ids") is not None)
        kwargs.pop("softcap", None)  # which sdpa leaves out, and since transformers 5.22 refuses
        return sdpa_attention_forward(module, q, k, v, attention_mask, **kwargs)

    AttentionInterface.register(RECORDING, attend)
    AttentionMaskInterface.register(RECORDING, sdpa_mask)
    yield seen
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(RECORDING)


def test_types_whose_attention_keeps_positions_to_itself_are_known(handed_on: list[bool]) -> None:
    assert len(TEXT_TYPES) >= 50
    found, seen = set(), set()
    for model_type in TEXT_TYPES:
        handed_on.clear()
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation=RECORDING)
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
        model(input_ids=torch.arange(3, 12)[None], position_ids=positions, use_cache=False)
        assert handed_on
        seen.add(text_type := model.config.get_text_config().model_type)
        if not all(handed_on):
            found.add(text_type)
    assert found == POSITIONS_KEPT & seen


@pytest.mark.parametrize("model_type", ["persimmon", "fuyu"])
def test_rmpad_on_flash_attn_is_told_of_and_torchs_attention_is_not(model_type: str) -> None:
    config = tiny_config(model_type)
    fault = rmpad_fault(config, "cuda")
    assert fault is not None
    assert f"computes {model_type} wrongly" in fault.why
    assert "attn_implementation=sdpa, or set actor_rollout_ref.actor.use_prefix_grouper=True" in fault.fix
    assert rmpad_fault(config, "cpu") is None
    assert rmpad_fault(tiny_config("mistral"), "cuda") is None
    config.get_text_config()._attn_implementation = "flash_attention_2"
    assert rmpad_fault(config, "cuda") is not None
    config.get_text_config()._attn_implementation = "sdpa"
    assert rmpad_fault(config, "cuda") is None


def test_capped_scores_on_a_flash_attn_built_without_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a build multiplies scores by the cap in stock verl too."""
    capped, built_without = tiny_config("gemma2"), ["does not cap scores"]
    monkeypatch.setattr(architectures, "kernel_obstacle", lambda name, device: "")
    monkeypatch.setattr(architectures, "model_obstacle", lambda name, device, needs: built_without[0])
    fault = rmpad_fault(capped, "cuda")
    assert fault is not None
    assert "computes gemma2 wrongly: flash_attn_2 does not cap scores" in fault.why
    assert rmpad_fault(capped, "cpu") is None
    assert rmpad_fault(tiny_config("mistral"), "cuda") is None
    built_without[0] = ""
    assert rmpad_fault(capped, "cuda") is None
