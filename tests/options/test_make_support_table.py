"""docs/support.md says what the tests showed, and a stale one is noticed."""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.options.table import OPTIONS

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_support_table.py"
MATRIX, GPU, TWO_GPUS = (f"tests.options.{name}" for name in ("test_matrix", "test_gpu", "test_two_gpus"))
RULE = "test_rule_stops_the_run_in_its_modes_and_only_there[distillation-packed-0]"


def case(module: str, name: str, *options: str, outcome: str = "") -> str:
    properties = "".join(f'<property name="option" value="{option}"/>' for option in options)
    child = f"<{outcome}/>" if outcome else ""
    return f'<testcase classname="{module}" name="{name}"><properties>{properties}</properties>{child}</testcase>'


@dataclass(frozen=True)
class Done:
    returncode: int
    stderr: str


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The script's main function, in a repository of its own."""
    spec = importlib.util.spec_from_file_location("make_support_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_support_table", script)  # dataclasses look their module up
    spec.loader.exec_module(script)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: Done(script.main(["--root", str(tmp_path), *arguments]), capsys.readouterr().err)


@pytest.fixture
def junit(tmp_path: Path) -> Callable[..., str]:
    (tmp_path / "docs").mkdir()

    def write(name: str, *cases: str) -> str:
        suite = f'<testsuites><testsuite hostname="secret" timestamp="now">{"".join(cases)}</testsuite></testsuites>'
        (tmp_path / name).write_text(suite)
        return name

    return write


def rows(folder: Path) -> dict[str, list[str]]:
    lines = [line for line in (folder / "docs/support.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_every_option_has_a_row_with_what_its_tests_showed(run: Callable, junit: Callable, tmp_path: Path) -> None:
    cpu = junit(
        "cpu.xml",
        case(MATRIX, "one", "pad_to_length"),
        case(MATRIX, "two", "pad_to_length", "static rows"),
        case(MATRIX, "three", "LoRA", outcome="skipped"),
        case("tests.config.test_rules", RULE),
    )
    gpu = junit("gpu.xml", case(GPU, "one", "Liger kernels"), case(TWO_GPUS, "two", "pad_to_length"))
    assert run("--record", "gpu", gpu, "--environment", "a GPU").returncode == 0
    done = run("--results", cpu)
    assert done.returncode == 0, done.stderr
    table = rows(tmp_path)
    assert set(table) == {"option", *(option.name for option in OPTIONS)}
    assert table["pad_to_length"][1:6] == ["exact", "3", "yes", "", "yes"]
    assert table["static rows"][1:6] == ["exact", "1", "yes", "", ""]
    assert table["Liger kernels"][1:6] == ["exact", "1", "", "yes", ""]
    assert table["LoRA"][1:6] == ["not run", "0", "", "", ""]
    assert table["distillation"][1:6] == ["rejected", "1", "yes", "", ""]
    assert "refused with activation offload" in table["verify mode"][-1]
    assert "GPU results: a GPU." in (tmp_path / "docs/support.md").read_text()


def test_check_fails_on_a_stale_table_with_the_command_that_renews_it(
    run: Callable, junit: Callable, tmp_path: Path
) -> None:
    results = junit("tests.xml", case(MATRIX, "one", "pad_to_length"))
    stale = run("--results", results, "--check")
    assert stale.returncode == 1
    assert "docs/support.md is stale" in stale.stderr
    assert "python scripts/make_support_table.py --results tests.xml" in stale.stderr
    assert not (tmp_path / "docs/support.md").exists()
    assert run("--results", results).returncode == 0
    fresh = run("--results", results, "--check")
    assert fresh.returncode == 0, fresh.stderr


def test_tests_of_a_run_of_their_own_stay_counted(run: Callable, junit: Callable, tmp_path: Path) -> None:
    slow = junit("slow.xml", case(MATRIX, "slow", "LoRA"), case("tests.test_other", "unrelated"))
    assert run("--record", "slow", slow).returncode == 0
    assert run("--results", junit("tests.xml", case(MATRIX, "quick", "LoRA"))).returncode == 0
    before = (tmp_path / "docs/support.md").read_text()
    assert rows(tmp_path)["LoRA"][2] == "2"
    everything = junit("all.xml", case(MATRIX, "quick", "LoRA"), case(MATRIX, "slow", "LoRA"))
    assert run("--results", everything).returncode == 0
    assert (tmp_path / "docs/support.md").read_text() == before
    record = json.loads((tmp_path / "docs/data/support_slow.json").read_text())
    assert record == {"environment": "", "options": {"tests/options/test_matrix.py::slow": ["LoRA"]}}


def test_no_table_is_made_from_a_run_with_failures(run: Callable, junit: Callable, tmp_path: Path) -> None:
    done = run("--results", junit("tests.xml", case(MATRIX, "broken", "LoRA", outcome="failure")))
    assert done.returncode == 1
    assert "1 tests failed, the first of them tests/options/test_matrix.py::broken" in done.stderr
    assert not (tmp_path / "docs/support.md").exists()


def test_a_missing_results_file_is_one_line(run: Callable, junit: Callable) -> None:
    done = run("--results", "none.xml")
    assert done.returncode == 1
    assert "none.xml" in done.stderr.splitlines()[-1]
