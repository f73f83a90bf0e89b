"""The tests notice every change on the list, and the script that says so would tell if they did not."""

import multiprocessing
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mutate
import pytest
from mutate import EQUIVALENT, NOTICED, SURVIVED, Mutation, Outcome

ROOMS = ("attention", "batching", "config", "engine", "layout", "trainer")
DOUBLED = Mutation("a sum is a product", "maths.py", "x + x", "x * x", ("tests/test_maths.py::test_doubles",))


def test_the_record_has_every_change_and_none_that_no_test_notices() -> None:
    mutations = mutate.read_mutations()
    assert len(mutations) >= 120
    rooms = Counter(Path(mutation.file).parts[0] for mutation in mutations)
    assert rooms.keys() == {*ROOMS, "architectures", "cost", "upstream"}
    assert min(rooms[room] for room in ROOMS) >= 15
    assert mutate.stale(mutations, mutate.read_record(mutate.REPOSITORY / mutate.RECORD)) == []


def outcome(mutation: Mutation, outcome: str = NOTICED) -> Outcome:
    return Outcome(mutation.file, mutation.name, mutation.digest, outcome, "", 1.0, "abc")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one function, with a test that a product would pass at 2."""
    for path, text in {
        "verl_pg_plugin/__init__.py": "",
        "verl_pg_plugin/maths.py": "def double(x):\n    return x + x\n",
        "tests/test_maths.py": "from verl_pg_plugin.maths import double\n\n\n"
        "def test_doubles():\n    assert double(3) == 6\n\n\n"
        "def test_doubles_two():\n    assert double(2) == 4\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(mutate, "_commit", lambda root: "abc")
    # There is one fork server in a process, and tests of models have loaded this package into it.
    monkeypatch.setattr(mutate, "FORKS", multiprocessing.get_context("spawn"))
    return tmp_path


def test_a_change_is_noticed_or_survives_and_the_tree_stays_as_it_is(tree: Path) -> None:
    before = (tree / "verl_pg_plugin/maths.py").read_text()
    weak = replace(DOUBLED, tests=("tests/test_maths.py::test_doubles_two",))
    found = list(mutate.run([DOUBLED, weak], workers=1, root=tree))
    assert [row.outcome for row in found] == [NOTICED, SURVIVED]
    assert [row.failed for row in found] == ["tests/test_maths.py::test_doubles", ""]
    assert (tree / "verl_pg_plugin/maths.py").read_text() == before


def test_a_change_with_which_tests_do_not_run_is_an_error(tree: Path) -> None:
    with pytest.raises(RuntimeError, match=r"a sum is a product: the tests did not run, exit code [24]"):
        list(mutate.run([replace(DOUBLED, new="x +")], workers=1, root=tree))


def test_a_test_that_fails_without_the_change_too_proves_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "_first_failure", lambda copy, tests: "tests/test_maths.py::test_fails")
    with pytest.raises(RuntimeError, match="test_fails fails without any change too"):
        list(mutate.run([DOUBLED], workers=1, root=tree))


def test_a_change_that_is_noticed_is_not_equivalent(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    equivalent = replace(DOUBLED, equivalent="nobody doubles three")
    monkeypatch.setattr(mutate, "_first_failure", lambda copy, tests: "")
    assert [row.outcome for row in mutate.run([equivalent], workers=1, root=tree)] == [EQUIVALENT]
    monkeypatch.setattr(mutate, "_first_failure", lambda copy, tests: "test_doubles")
    with pytest.raises(RuntimeError, match="test_doubles notices it, so it is not equivalent"):
        list(mutate.run([equivalent], workers=1, root=tree))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"old": "x"}, "its old text occurs 3 times in maths.py"),
        ({"old": "x - x"}, "its old text occurs 0 times in maths.py"),
        ({"file": "gone.py"}, "its old text occurs 0 times in gone.py"),
        ({"new": "x + x"}, "it changes nothing"),
        ({"tests": ()}, "it names no test"),
        ({"tests": ("tests/test_maths.py::test_gone",)}, "there is no test tests/test_maths.py::test_gone"),
    ],
)
def test_a_change_that_cannot_be_made_is_named(tree: Path, change: dict, problem: str) -> None:
    mutation = replace(DOUBLED, **change)
    assert mutate.stale([mutation], {mutation.digest: outcome(mutation)}, tree) == [f"{mutation.name}: {problem}"]


def test_a_record_of_another_list_is_stale(tree: Path) -> None:
    edited = replace(DOUBLED, new="x")
    record = {DOUBLED.digest: outcome(DOUBLED)}
    assert mutate.stale([DOUBLED], record, tree) == []
    missing, gone = mutate.stale([edited], record, tree)
    assert "not in the record" in missing
    assert "no longer in the lists" in gone
    (survived,) = mutate.stale([DOUBLED], {DOUBLED.digest: outcome(DOUBLED, SURVIVED)}, tree)
    assert "no test notices it" in survived


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, rows = tmp_path / "record.csv", {DOUBLED.digest: outcome(DOUBLED)}
    mutate.write_record(path, [DOUBLED], rows)
    assert mutate.read_record(path) == rows
    assert mutate.read_record(tmp_path / "none.csv") == {}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_change_is_noticed_today(tmp_path: Path) -> None:
    """What the record says of the day it was made."""
    record = tmp_path / "record.csv"
    command = [sys.executable, Path(mutate.__file__), "--all", "--record", record]
    done = subprocess.run(command, capture_output=True, text=True, cwd=mutate.REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mutate.stale(mutate.read_mutations(), mutate.read_record(record)) == []
