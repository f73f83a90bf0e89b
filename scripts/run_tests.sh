#!/usr/bin/env bash
# Lint, format check, type check and tests; installs into .venv first if needed.
#
#   bash scripts/run_tests.sh [--slow] [PYTEST_ARGS ...]      # e.g. bash scripts/run_tests.sh tests/layout -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh

selection=(-m "not slow")
if [ "${1:-}" = "--slow" ]; then selection=(); shift; fi

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# One thread: on two cores, tiny models and two-process tests are slower when they fight over threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/python -m pytest "${selection[@]}" --durations=15 "$@"
