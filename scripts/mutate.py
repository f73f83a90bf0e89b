#!/usr/bin/env python
"""Do the tests notice? One small change to the package at a time, and the tests that must fail with it.

    python scripts/mutate.py                          # runs what docs/data/mutations.csv lacks, and adds it there
    python scripts/mutate.py --all                    # runs all, a quarter of an hour on two cores
    python scripts/mutate.py --all --only swap gate/  # runs those with a word in their name or file
    python scripts/mutate.py --check                  # fails if the record is stale; runs nothing

The changes are in ``tests/mutations/``, by room of the package: slips of a careless refactoring, written by
hand (a dropped collective or an agreement that is made once is no single operator, which is what mutmut and cosmic-ray
change, and neither takes the tests of each change). A change that no test can notice says why, under ``equivalent``.

Each runs in a copy of the tree, in a process of its own. A change counts as noticed where one of its tests fails that
passes without it.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import json
import multiprocessing
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from xml.etree import ElementTree

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE, LISTS, RECORD = Path("verl_pg_plugin"), Path("tests/mutations"), Path("docs/data/mutations.csv")
NOT_COPIED = (".git", ".venv*", "outputs", "checkpoints", "__pycache__", ".*_cache", ".hypothesis", "*.png")
TIME_LIMIT = 300
"""Of a test, in seconds."""
NOTICED, EQUIVALENT, SURVIVED = "noticed", "equivalent", "survived"
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "tensordict", "transformers"),
    *("transformers.modeling_utils", "transformers.models.qwen3", "peft", "datasets", "pandas", "pyarrow.parquet"),
    *("pydantic", "ray", "hydra", "omegaconf", "hypothesis", "pytest", "huggingface_hub"),
)
"""Other people's modules that take seconds to import: loaded once, and each process forked from there. verl is none of
them, since it imports this package."""


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        name: what has gone wrong, in words.
        file: that is changed, in the package.
        old, new: text that occurs once in it, and what takes its place.
        tests: files or tests that must fail, as pytest takes them.
        equivalent: why nothing that a user could see changes; empty where the tests must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def digest(self) -> str:
        """Of all that decides what is run."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    def problem(self, root: Path) -> str:
        """Why it cannot be made in this tree; empty if it can."""
        path = root / PACKAGE / self.file
        count = path.read_text().count(self.old) if path.is_file() else 0
        if count != 1:
            return f"its old text occurs {count} times in {self.file}"
        if self.old == self.new:
            return "it changes nothing"
        missing = [test for test in self.tests if not _exists(test, root)]
        return f"there is no test {missing[0]}" if missing else "" if self.tests else "it names no test"


@dataclass(frozen=True)
class Outcome:
    """A line of the record.

    Attributes:
        file, name: of the mutation.
        digest: of the mutation as it was when it ran.
        outcome: noticed, equivalent or survived.
        failed: the test that noticed it.
        seconds: until then.
        commit: that was checked out.
    """

    file: str
    name: str
    digest: str
    outcome: str
    failed: str
    seconds: float
    commit: str


def read_mutations(root: Path = REPOSITORY) -> list[Mutation]:
    """All changes, room by room; ValueError for an entry that is none, or a name that is not its own."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    lists = [yaml.load(path.read_bytes(), loader) for path in sorted((root / LISTS).glob("*.yaml"))]
    entries = [entry for room in lists for entry in room]
    try:
        mutations = [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{LISTS}: {error}") from error
    twice = [name for name, count in Counter(mutation.name for mutation in mutations).items() if count > 1]
    if twice:
        raise ValueError(f"{LISTS}: two changes are named {twice[0]!r}")
    return mutations


def read_record(path: Path) -> dict[str, Outcome]:
    """Outcomes by digest, nothing where there is no record."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = [Outcome(**{**row, "seconds": float(row["seconds"])}) for row in csv.DictReader(file)]
    return {row.digest: row for row in rows}


def write_record(path: Path, mutations: Sequence[Mutation], outcomes: dict[str, Outcome]) -> None:
    """In the order of the lists, without what they no longer have."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Outcome)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(outcomes[m.digest]) for m in mutations if m.digest in outcomes)


def stale(mutations: Sequence[Mutation], outcomes: dict[str, Outcome], root: Path = REPOSITORY) -> list[str]:
    """What keeps the record from proving that the tests notice every change."""
    found = []
    for mutation in mutations:
        recorded = outcomes.get(mutation.digest)
        if problem := mutation.problem(root):
            found.append(f"{mutation.name}: {problem}")
        elif recorded is None:
            found.append(f"{mutation.name}: not in the record; run python scripts/mutate.py")
        elif recorded.outcome == SURVIVED:
            found.append(f"{mutation.name}: no test notices it")
    gone = outcomes.keys() - {mutation.digest for mutation in mutations}
    return [*found, *(f"{outcomes[digest].name}: recorded, and no longer in the lists" for digest in sorted(gone))]


def run(mutations: Sequence[Mutation], workers: int, root: Path = REPOSITORY) -> Iterator[Outcome]:
    """Make every change and run its tests; outcomes in the order of the changes.

    Raises:
        ValueError: a change cannot be made in this tree.
        RuntimeError: at the end, where tests did not run, or one that failed does without the change too.
    """
    for mutation in mutations:
        if problem := mutation.problem(root):
            raise ValueError(f"{mutation.name}: {problem}")
    commit, failed, problems = _commit(root), set(), []
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(workers):
            copies.put(_copy(root, Path(folder, str(number))))

        def outcome_of(mutation: Mutation) -> Outcome | None:
            copy = copies.get()
            try:
                return _outcome(mutation, copy, commit)
            except RuntimeError as error:
                problems.append(f"{mutation.name}: {error}")
                return None
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(workers) as threads:
            for outcome in filter(None, threads.map(outcome_of, mutations)):
                failed |= {outcome.failed} - {""}
                yield outcome
        if failed and (without := _first_failure(copies.get(), sorted(failed))):
            problems.append(f"{without} fails without any change too")
    if problems:
        raise RuntimeError("\n".join(problems))


def _outcome(mutation: Mutation, copy: Path, commit: str) -> Outcome:
    path = copy / PACKAGE / mutation.file
    source, start = path.read_text(), time.monotonic()
    path.write_text(source.replace(mutation.old, mutation.new))
    try:
        failed = _first_failure(copy, mutation.tests)
    finally:
        path.write_text(source)
    if failed and mutation.equivalent:
        raise RuntimeError(f"{failed} notices it, so it is not equivalent")
    outcome = NOTICED if failed else EQUIVALENT if mutation.equivalent else SURVIVED
    seconds = round(time.monotonic() - start, 1)
    return Outcome(mutation.file, mutation.name, mutation.digest, outcome, failed, seconds, commit)


def _first_failure(copy: Path, tests: Iterable[str]) -> str:
    """The first of the tests that fails in a copy, empty if all pass; RuntimeError where they do not run."""
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # examples that another change failed with
    results, output = copy / "results.xml", copy / "output.txt"
    results.unlink(missing_ok=True)
    process = FORKS.Process(target=_pytest, args=(copy, tuple(tests), results, output))
    process.start()
    process.join()
    if process.exitcode == 0:
        return ""
    cases = ElementTree.parse(results).iter("testcase") if results.exists() else ()
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    # Behind a written report the process may still be killed, or stumble over threads of its own; pytest's 2 to 5 are
    # its own errors, such as a module that cannot be imported.
    if process.exitcode in range(2, 6) or not failed:
        raise RuntimeError(f"the tests did not run, exit code {process.exitcode}:\n{output.read_text()[-4000:]}")
    name = f"{failed[0].attrib['file']}::{failed[0].attrib['name']}"
    if any("Timeout" in (found.get("message") or "") for found in failed[0].iter()):
        raise RuntimeError(f"{name} ran into its time limit, which on a busy machine proves nothing")
    return name


def _pytest(copy: Path, tests: tuple[str, ...], results: Path, output: Path) -> None:
    """Ends the process, a fresh one, with pytest's exit code."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    # Python takes compiled files for fresh by size and second, and two changes may share both: write none.
    sys.dont_write_bytecode = True
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "first_failure",
    }
    ours = [name for name in sys.modules if name.partition(".")[0] in ("verl", PACKAGE.name, "tests")]
    found = importlib.util.find_spec(PACKAGE.name)
    if ours or found is None or not str(found.origin).startswith(str(copy)):
        raise RuntimeError(f"the tests would not see the change: {found}, imported {ours}")
    import pytest

    options = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--timeout={TIME_LIMIT}")
    told = ("-o", "junit_family=xunit1", f"--junitxml={results}")  # the one that names files
    warnings = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of what was loaded before
    sys.exit(int(pytest.main([*options, *told, *warnings, *tests])))


def _exists(test: str, root: Path) -> bool:
    """Whether a file or a test in it is there; of a parametrized one, whether it is with any parameters."""
    file, _, name = test.partition("::")
    path = root / file
    if not name or not path.is_file():
        return path.exists()
    return f"def {name.partition('[')[0]}(" in path.read_text()


def _copy(root: Path, folder: Path) -> Path:
    return shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))


def _commit(root: Path) -> str:
    """Short hash of what is checked out, ``-dirty`` if the code has changed since."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=root, text=True).strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also what the record has")
    parser.add_argument("--only", nargs="+", default=("",), metavar="WORD", help="of the name or the file")
    parser.add_argument("--check", action="store_true", help="compare record and lists")
    parser.add_argument("--record", type=Path, default=REPOSITORY / RECORD, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    args = parser.parse_args(arguments)

    mutations, outcomes = read_mutations(), read_record(args.record)
    if args.check:
        found = stale(mutations, outcomes)
        sys.stderr.writelines(f"{line}\n" for line in found)
        return 1 if found else 0
    meant = [m for m in mutations if any(word in f"{m.name} {m.file}" for word in args.only)]
    proven = {digest for digest, recorded in outcomes.items() if recorded.outcome != SURVIVED}
    chosen = [m for m in meant if args.all or m.digest not in proven]
    os.environ.update(OMP_NUM_THREADS="1", VERL_PLATFORM="cpu")
    FORKS.set_forkserver_preload(list(PRELOADED))
    survived = 0
    for outcome in run(chosen, args.workers):
        survived += outcome.outcome == SURVIVED
        sys.stdout.write(f"{outcome.outcome:10} {outcome.seconds:5.0f} s  {outcome.name}  {outcome.failed}\n")
        sys.stdout.flush()
        outcomes[outcome.digest] = outcome
        write_record(args.record, mutations, outcomes)
    sys.stdout.write(f"{len(chosen)} changes, {survived} that no test notices\n")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
