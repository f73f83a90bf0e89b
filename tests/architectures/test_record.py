"""docs/models.md is what the record says, and the record is what the installed transformers does."""

import csv
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers
from make_models_table import FUSED, RECORD, RENEW, main, read_record

from tests.architectures.outcome import outcome_of
from tests.architectures.test_gpu_models import MODELS
from tests.architectures.tiny_configs import MODEL_TYPES, tiny_config
from verl_pg_plugin.architectures.compiled_types import COMPILED_TYPES, NOT_ON_GPU, ON_CPU_ALONE

REPOSITORY = Path(__file__).parents[2]
OUTCOMES = read_record(REPOSITORY)


def supported_versions() -> list[str]:
    lowest = re.search(r'"transformers>=([\d.]+)', (REPOSITORY / "pyproject.toml").read_text())
    highest = re.search(r"^transformers==([\d.]+)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert lowest is not None
    assert highest is not None
    return [lowest[1], highest[1]]


def test_the_document_is_made_from_the_record() -> None:
    assert main(["--check"]) == 0


@pytest.mark.parametrize("version", supported_versions())
def test_sixty_architectures_are_exact_on_the_lowest_and_the_highest_transformers(version: str) -> None:
    assert version in OUTCOMES, f"run {RENEW}"
    assert sum(outcome["status"] == "exact" for outcome in OUTCOMES[version].values()) >= 60


def test_every_type_of_the_installed_transformers_is_in_the_record_as_it_is() -> None:
    recorded = OUTCOMES.get(transformers.__version__, {})
    assert sorted(recorded) == list(MODEL_TYPES), f"run {RENEW}"
    for model_type in MODEL_TYPES:
        found = {name: value for name, value in recorded[model_type].items() if name != FUSED}
        assert asdict(outcome_of(model_type)) == found, f"{model_type}: run {RENEW}"


def test_every_mixture_that_auto_compiles_on_a_gpu_has_a_test_there() -> None:
    with torch.device("meta"):
        models = {
            model_type: transformers.AutoModelForCausalLM.from_config(tiny_config(model_type))
            for model_type in (COMPILED_TYPES - NOT_ON_GPU.keys()) & set(MODEL_TYPES)
        }
    parts = {model_type: {type(part).__name__ for part in model.modules()} for model_type, model in models.items()}
    mixtures = {
        model_type
        for model_type, names in parts.items()
        if any(name.endswith(("Experts", "Moe", "MoE")) for name in names)
    }
    assert mixtures == MODELS.keys() & set(MODEL_TYPES)


def test_the_log_says_that_a_type_ran_compiled_on_a_gpu_only_if_its_test_passed_there() -> None:
    with (REPOSITORY / "docs/data/gpu_tests_one_h200.csv").open(newline="") as lines:
        outcomes = {row["test"]: row["outcome"] for row in csv.DictReader(lines)}  # the last of each test
    passed = [test for test, outcome in outcomes.items() if outcome == "passed"]
    found = (re.search(r"test_gpu_models.py::test_compiled_.*\[(\w+)\]", name) for name in passed)
    assert {match[1] for match in found if match} == COMPILED_TYPES - NOT_ON_GPU.keys() - ON_CPU_ALONE


def test_a_document_that_differs_is_stale_and_a_failed_test_is_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RECORD).parent.mkdir(parents=True)
    (tmp_path / RECORD).write_text(json.dumps(OUTCOMES))
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--root", str(tmp_path), "--check"]) == 0
    before = read_record(tmp_path)["5.5.3"]
    fused = tmp_path / "fused.xml"
    said = {"transformers": "5.5.3", "model": json.dumps({"qwen3": {FUSED: True}})}
    properties = "".join(f"<property name='{name}' value='{value}'/>" for name, value in said.items())
    fused.write_text(
        f"<testsuite><testcase classname='a' name='silent'/><testcase classname='a' name='test[qwen3]'><properties>"
        f"{properties}</properties></testcase></testsuite>"
    )
    assert main(["--root", str(tmp_path), "--record", str(fused)]) == 0
    renewed = read_record(tmp_path)["5.5.3"]
    assert renewed == {**before, "qwen3": {**before["qwen3"], FUSED: True}}, "what other tests found stays"
    table = tmp_path / "docs/models.md"
    table.write_text(table.read_text().replace("| qwen3 | yes |", "| qwen3 | no |"))
    assert main(["--root", str(tmp_path), "--check"]) == 1
    assert "is stale" in capsys.readouterr().err
    failed = tmp_path / "failed.xml"
    failed.write_text('<testsuite><testcase classname="a" name="test[qwen3]"><failure/></testcase></testsuite>')
    assert main(["--root", str(tmp_path), "--record", str(failed)]) == 1
    assert "test[qwen3] did not pass" in capsys.readouterr().err
