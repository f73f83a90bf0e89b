"""docs/models.md matches the record, and the record matches the installed transformers."""

from dataclasses import asdict
from pathlib import Path

import transformers
from make_models_table import PAGE, page, passing, read_record

from tests.architectures.outcome import outcome_of
from tests.architectures.tiny_configs import MODEL_TYPES

RENEW = "run python scripts/make_models_table.py"


def test_page_and_record_match_installed_transformers() -> None:
    assert page(read_record()) == PAGE.read_text(), RENEW
    outcomes = {model_type: asdict(outcome_of(model_type)) for model_type in MODEL_TYPES}
    assert read_record().get(transformers.__version__) == outcomes, RENEW


def test_a_type_is_exact_only_if_it_has_tests_and_all_pass(tmp_path: Path) -> None:
    file = tmp_path / "test_types.py"
    file.write_text(
        """
import pytest
from pytest import mark

@mark.parametrize("name", ["exact", "wrong", "wrong-2", "skipped"])
def test_engine(name):
    assert name != "wrong"
    if name == "skipped":
        pytest.skip("not here")

@mark.parametrize("name", ["exact"])
def test_critic(name):
    pass
"""
    )
    assert passing({"exact", "wrong", "wrong-2", "skipped", "without_tests"}, [file]) == {"exact", "wrong-2"}
    assert passing(set(), [tmp_path / "missing.py"]) == set()
