"""docs/models.md is what the record says, and the record is what the installed transformers does."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import transformers
from make_models_table import FUSED, RENEW, main, read_record

from tests.architectures.outcome import outcome_of
from tests.architectures.tiny_configs import MODEL_TYPES

REPOSITORY = Path(__file__).parents[2]
OUTCOMES = read_record(REPOSITORY)


def supported_versions() -> list[str]:
    project, usual = (REPOSITORY / "pyproject.toml").read_text(), (REPOSITORY / "constraints.txt").read_text()
    return re.findall(r'"transformers[<>]=([\d.]+)', project) + re.findall(
        r"^transformers==([\d.]+)", usual, re.MULTILINE
    )


def test_the_document_is_made_from_the_record() -> None:
    assert main(["--check"]) == 0


@pytest.mark.parametrize("version", supported_versions())
def test_sixty_architectures_are_exact_on_the_lowest_the_usual_and_the_highest_transformers(version: str) -> None:
    assert version in OUTCOMES, f"run {RENEW}"
    assert sum(outcome["status"] == "exact" for outcome in OUTCOMES[version].values()) >= 60


def test_every_type_of_the_installed_transformers_is_in_the_record_as_it_is() -> None:
    recorded = OUTCOMES.get(transformers.__version__, {})
    assert sorted(recorded) == list(MODEL_TYPES), f"run {RENEW}"
    for model_type in MODEL_TYPES:
        found = {name: value for name, value in recorded[model_type].items() if name not in (FUSED, "compiled")}
        expected = {name: value for name, value in asdict(outcome_of(model_type)).items() if name != "compiled"}
        assert expected == found, f"{model_type}: run {RENEW}"
