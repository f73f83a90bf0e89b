"""docs/models.md is what the record says, the record what transformers does; faults of stock rmpad are told of."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
import transformers
from make_models_table import PAGE, REPOSITORY, page, read_record
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tests.architectures.outcome import EXACT, outcome_of
from tests.architectures.tiny_configs import MODEL_TYPES, tiny_config
from verl_pg_plugin import architectures
from verl_pg_plugin.architectures import MASKS_WITHOUT_POSITIONS, POSITIONS_KEPT, rmpad_fault

RECORDING = "recording"


@pytest.fixture
def handed_on() -> Iterator[list[tuple[bool, bool]]]:
    """Whether each attention layer got positions, and a mask that hides token 4 from token 5, which begins anew."""
    seen: list[tuple[bool, bool]] = []

    def attend(module: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        hides = attention_mask is not None and not attention_mask[0, 0, 5, 4]
        seen.append((kwargs.get("position_ids") is not None, hides))
        kwargs.pop("softcap", None)  # which sdpa leaves out, and since transformers 5.22 refuses
        return sdpa_attention_forward(module, q, k, v, attention_mask, **kwargs)

    AttentionInterface.register(RECORDING, attend)
    AttentionMaskInterface.register(RECORDING, sdpa_mask)
    yield seen
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(RECORDING)


def test_types_that_do_not_tell_attention_where_sequences_begin_are_known(handed_on: list[tuple[bool, bool]]) -> None:
    exact = [model_type for model_type in MODEL_TYPES if outcome_of(model_type).status == EXACT]
    kept, unmasked, seen = set(), set(), set()
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
        positions_told, masks_tell = zip(*handed_on, strict=True)
        if not all(positions_told):
            kept.add(text_type)
        if not all(masks_tell):
            unmasked.add(text_type)
    assert kept == POSITIONS_KEPT & seen
    assert unmasked == MASKS_WITHOUT_POSITIONS & seen


TOLD: list[tuple[str, str | None, str, str, str]] = [
    *(
        ("gpt_oss", implementation, device, "computes gpt_oss wrongly: its masks", "use_remove_padding=False")
        for implementation, device in ((None, "cpu"), ("sdpa", "cuda"), ("eager", "cuda"))
    ),
    ("gpt_oss", None, "cuda", "", ""),
    *(
        (
            model_type,
            implementation,
            "cuda",
            f"computes {model_type} wrongly",
            "attn_implementation=sdpa, or set actor_",
        )
        for model_type in ("persimmon", "fuyu")
        for implementation in (None, "flash_attention_2")
    ),
    *((model_type, "sdpa", "cuda", "", "") for model_type in ("persimmon", "fuyu", "mistral")),
    *((model_type, None, "cpu", "", "") for model_type in ("persimmon", "fuyu", "mistral")),
    ("mistral", None, "cuda", "", ""),
]
"""A type, its attention, the device, and what is said: of masks that know no sequences, of flash-attn's positions."""


@pytest.mark.parametrize(("model_type", "implementation", "device", "why", "fix"), TOLD)
def test_rmpad_is_told_of_where_it_is_wrong(
    model_type: str, implementation: str | None, device: str, why: str, fix: str
) -> None:
    config = tiny_config(model_type)
    config.get_text_config()._attn_implementation = implementation
    fault = rmpad_fault(config, device)
    assert (fault is not None) == bool(why)
    assert fault is None or (why in fault.why and fix in fault.fix)


@pytest.mark.parametrize("obstacle", ["does not cap scores", ""])
def test_capped_scores_on_a_flash_attn_built_without_are_told_of(
    obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a build multiplies scores by the cap in stock verl too."""
    monkeypatch.setattr(architectures, "kernel_obstacle", lambda name, device, needs=None: obstacle if needs else "")
    fault = rmpad_fault(tiny_config("gemma2"), "cuda")
    assert (fault is not None) == bool(obstacle)
    assert fault is None or "computes gemma2 wrongly: flash_attn_2 does not cap scores" in fault.why
    assert rmpad_fault(tiny_config("gemma2"), "cpu") is None
    assert rmpad_fault(tiny_config("mistral"), "cuda") is None


RENEW = "run python scripts/make_models_table.py"


def supported_versions() -> list[str]:
    project, usual = (REPOSITORY / "pyproject.toml").read_text(), (REPOSITORY / "constraints.txt").read_text()
    return re.findall(r'"transformers[<>]=([\d.]+)', project) + re.findall(
        r"^transformers==([\d.]+)", usual, re.MULTILINE
    )


def test_the_document_is_made_from_the_record() -> None:
    assert page(read_record()) == PAGE.read_text(), RENEW


@pytest.mark.parametrize("version", supported_versions())
def test_sixty_architectures_are_exact_on_the_lowest_the_usual_and_the_highest_transformers(version: str) -> None:
    assert sum(outcome["status"] == "exact" for outcome in read_record()[version].values()) >= 60


def test_every_type_of_the_installed_transformers_is_in_the_record_as_it_is() -> None:
    outcomes = {model_type: asdict(outcome_of(model_type)) for model_type in MODEL_TYPES}
    assert read_record().get(transformers.__version__) == outcomes, RENEW
