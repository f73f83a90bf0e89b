"""docs/models.md matches the record, and the record matches the installed transformers."""

from dataclasses import asdict

import transformers
from make_models_table import PAGE, page, read_record

from tests.architectures.outcome import outcome_of
from tests.architectures.tiny_configs import MODEL_TYPES

RENEW = "run python scripts/make_models_table.py"


def test_page_and_record_match_installed_transformers() -> None:
    assert page(read_record()) == PAGE.read_text(), RENEW
    outcomes = {model_type: asdict(outcome_of(model_type)) for model_type in MODEL_TYPES}
    assert read_record().get(transformers.__version__) == outcomes, RENEW
