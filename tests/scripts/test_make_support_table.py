"""docs/support.md says what the tests showed, and a stale one is noticed."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.options.table import OPTIONS

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_support_table.py"
MATRIX, GPU, TWO_GPUS = (f"tests.options.{name}" for name in ("test_matrix", "test_gpu", "test_two_gpus"))
RULE = "test_rule_stops_the_run_in_its_modes_and_only_there[distillation-packed-0]"

FILES = {
    "config/test_rules": "def test_rule_stops_the_run_in_its_modes_and_only_there():\n    pass\n",
    "engine/steps/test_verify": """\
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu():
    pass


def test_without():
    pass
""",
    "options/test_gpu": """\
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("process_group"),
]


def test_one(case):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two(case):
    pass
""",
    "options/test_matrix": """\
@pytest.mark.slow
def test_slow(case):
    pass


@pytest.mark.parametrize("case", CASES)
def test_case(case):
    pass
""",
    "options/test_training_runs": "pytestmark = pytest.mark.slow\n\n\ndef test_long(case):\n    pass\n",
    "options/test_two_gpus": "pytestmark = [pytest.mark.gpu]\n\n\ndef test_two(case):\n    pass\n",
}
"""What the tests of a checkout look like, as ruff formats them."""


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
def git(tmp_path: Path) -> Callable[..., str]:
    """git, in a checkout with one commit."""

    def run_git(*arguments: str) -> str:
        author = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        return subprocess.check_output(["git", *author, *arguments], cwd=tmp_path, text=True).strip()

    for name, text in FILES.items():
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""Tests."""\n\nimport pytest\n\n\n{text}')
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/support.md").write_text("")
    run_git("init", "--quiet")
    run_git("add", ".")
    run_git("commit", "--quiet", "--message=all")
    return run_git


@pytest.fixture
def junit(tmp_path: Path, git: Callable[..., str]) -> Callable[..., str]:
    """Writes a results file into that checkout."""

    def write(name: str, *cases: str) -> str:
        suite = f'<testsuites><testsuite hostname="secret" timestamp="now">{"".join(cases)}</testsuite></testsuites>'
        (tmp_path / name).write_text(suite)
        return name

    return write


def document(folder: Path) -> str:
    return (folder / "docs/support.md").read_text()


def rows(folder: Path) -> dict[str, list[str]]:
    lines = [line for line in document(folder).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_every_option_has_a_row_with_what_its_tests_showed(
    run: Callable, junit: Callable, git: Callable, tmp_path: Path
) -> None:
    cpu = junit(
        "cpu.xml",
        case(MATRIX, "test_case[one]", "pad_to_length"),
        case(MATRIX, "test_case[two]", "pad_to_length", "static rows"),
        case(MATRIX, "test_case[three]", "LoRA", outcome="skipped"),
        case(MATRIX, "test_case[four]", "entropy bonus", "a group larger than the token budget"),
        case(MATRIX, "test_case[carried groups]", "critic"),
        case("tests.config.test_rules", RULE),
        case("tests.test_other", "test_that_proves_nothing"),
    )
    gpu = junit("gpu.xml", case(GPU, "test_one[a]", "Liger kernels"), case(TWO_GPUS, "test_two[b]", "pad_to_length"))
    assert run("--record", "gpu", gpu, "--environment", "a GPU") == Done(0, "")
    assert run("--record", "two_gpus", gpu, "--environment", "two GPUs") == Done(0, "")
    assert run("--results", cpu) == Done(0, "")
    table = rows(tmp_path)
    assert set(table) == {"option", *(option.name for option in OPTIONS)}
    assert table["pad_to_length"][1:6] == ["exact", "3", "yes", "", "yes"]
    assert table["static rows"][1:6] == ["exact", "1", "yes", "", ""]
    assert table["Liger kernels"][1:6] == ["exact", "1", "", "yes", ""]
    assert table["LoRA"][1:6] == ["not run", "0", "", "", ""]
    assert table["distillation"][1:6] == ["rejected", "1", "yes", "", ""]
    assert {name for name, cells in table.items() if cells[6] == "yes"} == {
        "a group larger than the token budget",
        "entropy bonus",
        "critic",
    }
    assert "refused with activation offload" in table["verify mode"][-1]
    commit = git("rev-parse", "--short", "HEAD")
    assert f"- gpu tests: a GPU, commit {commit}\n- two gpus tests: two GPUs, commit {commit}\n" in document(tmp_path)


def test_without_a_record_the_document_names_the_command_that_makes_one(
    run: Callable, junit: Callable, tmp_path: Path
) -> None:
    assert run("--results", junit("tests.xml", case(MATRIX, "test_case[one]", "LoRA"))) == Done(0, "")
    lines = [line for line in document(tmp_path).splitlines() if "no run is recorded" in line]
    assert [line.partition(":")[0] for line in lines] == ["- gpu tests", "- two gpus tests", "- slow tests"]
    for (kind, mark), line in zip((("gpu", "gpu"), ("two_gpus", "gpu"), ("slow", "slow")), lines, strict=True):
        assert f"python -m pytest -m {mark} --junitxml=outputs/{kind}.xml" in line
        assert f"python scripts/make_support_table.py --record {kind} outputs/{kind}.xml" in line


def test_check_fails_on_a_stale_table_with_the_command_that_renews_it(
    run: Callable, junit: Callable, tmp_path: Path
) -> None:
    results = junit("tests.xml", case(MATRIX, "test_case[one]", "pad_to_length"))
    stale = run("--results", results, "--check")
    assert stale.returncode == 1
    assert "docs/support.md is stale" in stale.stderr
    assert "python scripts/make_support_table.py --results tests.xml" in stale.stderr
    assert document(tmp_path) == ""
    assert run("--results", results) == Done(0, "")
    assert run("--results", results, "--check") == Done(0, "")


def test_gpu_and_slow_tests_count_by_their_records_alone(run: Callable, junit: Callable, tmp_path: Path) -> None:
    quick = [case(MATRIX, "test_case[LoRA]", "LoRA"), case("tests.engine.steps.test_verify", "test_without")]
    others = [
        case(MATRIX, "test_slow[LoRA]", "LoRA"),
        case(MATRIX, "test_case[compiled layers + LoRA]", "compiled layers", "LoRA"),  # slow by its parameter
        case("tests.options.test_training_runs", "test_long[LoRA]", "LoRA"),
        case(GPU, "test_one[LoRA]", "LoRA"),
        case(GPU, "test_two[LoRA]", "LoRA"),
        case(TWO_GPUS, "test_two[LoRA]", "LoRA"),
        case("tests.engine.steps.test_verify", "test_on_a_gpu[None]"),
    ]
    here, everywhere = junit("tests.xml", *quick), junit("all.xml", *quick, *others)
    assert run("--results", here) == Done(0, "")
    assert run("--results", everywhere, "--check") == Done(0, "")
    assert rows(tmp_path)["LoRA"][2:6] == ["1", "yes", "", ""]
    assert rows(tmp_path)["verify mode"][2:6] == ["1", "yes", "", ""]

    assert run("--record", "slow", everywhere) == Done(0, "")
    assert run("--results", here) == Done(0, "")
    assert rows(tmp_path)["LoRA"][2:6] == ["4", "yes", "", ""]
    assert run("--record", "gpu", everywhere) == Done(0, "")
    assert run("--results", here) == Done(0, "")
    assert rows(tmp_path)["LoRA"][2:6] == ["6", "yes", "yes", ""]
    assert run("--record", "two_gpus", everywhere) == Done(0, "")
    assert run("--results", here) == Done(0, "")
    assert rows(tmp_path)["LoRA"][2:6] == ["7", "yes", "yes", "yes"]
    assert rows(tmp_path)["verify mode"][2:6] == ["2", "yes", "yes", ""]
    assert run("--results", everywhere, "--check") == Done(0, "")


@pytest.mark.parametrize(
    ("changed", "dirty"), [("docs/support.md", ""), ("untracked.py", ""), ("tests/config/test_rules.py", "-dirty")]
)
def test_a_record_keeps_its_proofs_and_commit_and_nothing_of_the_machine(
    changed: str, dirty: str, run: Callable, junit: Callable, git: Callable, tmp_path: Path
) -> None:
    (tmp_path / changed).write_text("changed")
    unrelated = case("tests.test_other", "test_unrelated")
    slow = junit("slow.xml", case(MATRIX, "test_slow", "LoRA"), case(MATRIX, "test_case", "LoRA"), unrelated)
    assert run("--record", "slow", slow) == Done(0, "")
    assert json.loads((tmp_path / "docs/data/support_slow.json").read_text()) == {
        "environment": "",
        "commit": git("rev-parse", "--short", "HEAD") + dirty,
        "options": {"tests/options/test_matrix.py::test_slow": ["LoRA"]},
    }


@pytest.mark.parametrize("gone", ["function", "file"])
def test_a_recorded_test_that_no_longer_exists_is_an_error(
    gone: str, run: Callable, junit: Callable, tmp_path: Path
) -> None:
    results = junit("tests.xml", case("tests.config.test_rules", RULE))
    assert run("--record", "slow", junit("slow.xml", case(MATRIX, "test_slow[x]", "LoRA"))) == Done(0, "")
    assert run("--results", results) == Done(0, "")
    matrix = tmp_path / "tests/options/test_matrix.py"
    if gone == "file":
        matrix.unlink()
    else:
        matrix.write_text(matrix.read_text().replace("def test_slow(", "def test_slowly("))
    before = document(tmp_path)
    for done in (run("--results", results, "--check"), run("--results", results)):
        assert done.returncode == 1
        assert "support_slow.json: the test tests/options/test_matrix.py::test_slow[x] no longer exists" in done.stderr
        assert "renew it: python -m pytest -m slow" in done.stderr
    assert document(tmp_path) == before


def test_a_record_without_a_commit_is_an_error(run: Callable, junit: Callable, tmp_path: Path) -> None:
    (tmp_path / "docs/data").mkdir()
    record = {"environment": "", "options": {"tests/options/test_matrix.py::test_slow": ["LoRA"]}}
    (tmp_path / "docs/data/support_slow.json").write_text(json.dumps(record))
    done = run("--results", junit("tests.xml", case(MATRIX, "test_case[one]", "LoRA")), "--check")
    assert done.returncode == 1
    assert "docs/data/support_slow.json: it names no commit" in done.stderr
    assert "--record slow outputs/slow.xml" in done.stderr


def test_a_run_that_skipped_every_gpu_test_makes_no_record(run: Callable, junit: Callable, tmp_path: Path) -> None:
    skipped = junit("gpu.xml", case(GPU, "test_one", "LoRA", outcome="skipped"), case(MATRIX, "test_case", "LoRA"))
    done = run("--record", "gpu", skipped)
    assert done.returncode == 1
    assert "no test in gpu.xml is marked gpu" in done.stderr
    assert not (tmp_path / "docs/data/support_gpu.json").exists()


def test_no_table_is_made_from_a_run_with_failures(run: Callable, junit: Callable, tmp_path: Path) -> None:
    done = run("--results", junit("tests.xml", case(MATRIX, "test_case", "LoRA", outcome="failure")))
    assert done.returncode == 1
    assert "1 tests failed, the first of them tests/options/test_matrix.py::test_case" in done.stderr
    assert document(tmp_path) == ""


def test_a_missing_results_file_is_one_line(run: Callable, git: Callable) -> None:
    done = run("--results", "none.xml")
    assert done.returncode == 1
    assert "none.xml" in done.stderr.splitlines()[-1]
