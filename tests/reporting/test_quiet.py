"""What is kept out of the log is what says nothing of the run."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import psutil
import pytest

from verl_pg_plugin.reporting.quiet import TRANSFER_THREADS, limit_transfer_threads, pass_over_missing_engines


@pytest.mark.parametrize(("cores", "there", "then"), [(2, None, "2"), (2, "5", "5"), (64, None, None)])
def test_transfer_queue_is_told_of_the_cores_of_a_small_machine(monkeypatch, cores, there, then) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: cores)
    monkeypatch.delenv(TRANSFER_THREADS, raising=False)
    if there:
        monkeypatch.setenv(TRANSFER_THREADS, there)
    limit_transfer_threads()
    assert os.environ.get(TRANSFER_THREADS) == then


def test_only_missing_engines_are_passed_over() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        pass_over_missing_engines()
        warnings.warn(
            """veomni engine is not available: ModuleNotFoundError("No module named 'veomni'")""", stacklevel=1
        )
        warnings.warn("megatron engine is not available: ImportError('libcuda')", stacklevel=1)
    assert [str(warning.message)[:8] for warning in shown] == ["megatron"]


def test_verl_is_imported_without_a_word_of_other_engines() -> None:
    command = [sys.executable, "-c", "import verl, verl.workers.engine"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "VERL_PLATFORM": "cpu"}
    )
    assert done.returncode == 0, done.stderr
    assert "engine is not available" not in done.stderr
