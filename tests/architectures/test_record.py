"""docs/models.md is what the record says, and the record is what the installed transformers does."""

import re
from dataclasses import asdict

import pytest
import transformers
from make_models_table import PAGE, REPOSITORY, page, read_record

from tests.architectures.outcome import outcome_of
from tests.architectures.tiny_configs import MODEL_TYPES

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
