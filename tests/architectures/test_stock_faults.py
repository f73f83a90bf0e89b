"""Models that stock rmpad on flash-attn computes wrongly are told of by name."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tests.architectures.outcome import EXACT, outcome_of
from tests.architectures.tiny_configs import MODEL_TYPES, tiny_config
from verl_pg_plugin import architectures
from verl_pg_plugin.architectures import POSITIONS_KEPT, rmpad_fault

RECORDING = "recording"


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
    exact = [model_type for model_type in MODEL_TYPES if outcome_of(model_type).status == EXACT]
    found, seen = set(), set()
    for model_type in exact:
        if not hasattr(tiny_config(model_type), "vocab_size"):
            continue
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
    assert rmpad_fault(config, "cpu") is None
    assert rmpad_fault(tiny_config("mistral"), "cuda") is None
    for implementation in (None, "flash_attention_2"):
        config.get_text_config()._attn_implementation = implementation
        fault = rmpad_fault(config, "cuda")
        assert fault is not None
        assert f"computes {model_type} wrongly" in fault.why
        assert "attn_implementation=sdpa, or set actor_rollout_ref.actor.use_prefix_grouper=True" in fault.fix
    config.get_text_config()._attn_implementation = "sdpa"
    assert rmpad_fault(config, "cuda") is None


@pytest.mark.parametrize("obstacle", ["does not cap scores", ""])
def test_capped_scores_on_a_flash_attn_built_without_are_told_of(
    obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a build multiplies scores by the cap in stock verl too."""
    monkeypatch.setattr(architectures, "kernel_obstacle", lambda name, device, needs=None: obstacle if needs else "")
    fault = rmpad_fault(tiny_config("gemma2"), "cuda")
    if obstacle:
        assert fault is not None
        assert "computes gemma2 wrongly: flash_attn_2 does not cap scores" in fault.why
    else:
        assert fault is None
    assert rmpad_fault(tiny_config("gemma2"), "cpu") is None
    assert rmpad_fault(tiny_config("mistral"), "cuda") is None
