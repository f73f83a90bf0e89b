"""docs/models.md is what the record says, the record what transformers does; faults of stock rmpad are told of."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
import transformers
from make_models_table import PAGE, page, read_record
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tests.architectures.outcome import EXACT, outcome_of
from tests.architectures.tiny_configs import MODEL_TYPES, tiny_config
from verl_pg_plugin.architectures import MASKS_WITHOUT_POSITIONS, POSITIONS_KEPT, rmpad_fault

RECORDING = "recording"


def test_types_that_do_not_tell_attention_where_sequences_begin_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether each attention layer got positions, and a mask that hides token 4 from token 5, which begins anew.
    handed_on: list[tuple[bool, bool]] = []

    def attend(module: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        hides = attention_mask is not None and not attention_mask[0, 0, 5, 4]
        handed_on.append((kwargs.get("position_ids") is not None, hides))
        kwargs.pop("softcap", None)  # which sdpa leaves out, and since transformers 5.22 refuses
        return sdpa_attention_forward(module, q, k, v, attention_mask, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, RECORDING, attend)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, RECORDING, sdpa_mask)
    exact = (model_type for model_type in MODEL_TYPES if outcome_of(model_type).status == EXACT)
    kept, unmasked, seen = set[str](), set[str](), set[str]()
    for model_type in (name for name in exact if hasattr(tiny_config(name), "vocab_size")):
        handed_on.clear()
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation=RECORDING)
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
        model(input_ids=torch.arange(3, 12)[None], position_ids=positions, use_cache=False)
        assert handed_on
        seen.add(text_type := model.config.get_text_config().model_type)
        positions_told, masks_tell = zip(*handed_on, strict=True)
        if not all(positions_told):
            kept.add(text_type)
        if not all(masks_tell):
            unmasked.add(text_type)
    assert kept == POSITIONS_KEPT & seen
    assert unmasked == MASKS_WITHOUT_POSITIONS & seen


MASKS = "its masks", "use_remove_padding=False"
POSITIONS = "its attention", "attn_implementation=sdpa, or set actor_"


@pytest.mark.parametrize(
    ("model_type", "implementation", "device", "why", "fix"),
    [
        *(("gpt_oss", *runs, *MASKS) for runs in ((None, "cpu"), ("sdpa", "cuda"), ("eager", "cuda"))),
        ("gpt_oss", None, "cuda", "", ""),
        *((kind, None, "cuda", *POSITIONS) for kind in ("persimmon", "fuyu")),
        *((kind, "flash_attention_2", "cuda", *POSITIONS) for kind in ("persimmon", "fuyu")),
        *((kind, "sdpa", "cuda", "", "") for kind in ("persimmon", "fuyu", "mistral")),
        *((kind, None, "cpu", "", "") for kind in ("persimmon", "fuyu", "mistral")),
        ("mistral", None, "cuda", "", ""),
    ],
)
def test_rmpad_is_told_of_where_it_is_wrong(model_type, implementation, device, why, fix) -> None:
    config = tiny_config(model_type)
    config.get_text_config()._attn_implementation = implementation
    fault = rmpad_fault(config, device)
    assert (fault is not None) == bool(why)
    assert fault is None or (f"computes {model_type} wrongly: {why}" in fault.why and fix in fault.fix)


RENEW = "run python scripts/make_models_table.py"


def test_the_document_is_made_from_the_record() -> None:
    assert page(read_record()) == PAGE.read_text(), RENEW


def test_every_type_of_the_installed_transformers_is_in_the_record_as_it_is() -> None:
    outcomes = {model_type: asdict(outcome_of(model_type)) for model_type in MODEL_TYPES}
    assert read_record().get(transformers.__version__) == outcomes, RENEW
