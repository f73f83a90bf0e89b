#!/usr/bin/env bash
# Lint, format check, type check and tests; installs into .venv first if needed. With PYTEST_ARGS, those tests alone.
# --slow adds the slow tests, and a selection on the lowest and on the highest transformers that work.
#
#   bash scripts/run_tests.sh [--slow] [PYTEST_ARGS ...]      # e.g. tests/layout -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not slow") slow=no
if [ "${1:-}" = --slow ]; then
  selection=() slow=yes
  shift
fi
bash scripts/install.sh

.venv/bin/ruff check .
.venv/bin/ruff format --check .
# One thread: on two cores, tiny models and two-process tests are slower when they fight over threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE # some containers set it, and then each of a hundred processes compiles the package
# A test that takes the memory of the machine fails by itself. CUDA reserves addresses beyond any such limit.
if ! command -v nvidia-smi >/dev/null; then ulimit -v 16000000; fi
export RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES=2000000000 # which the limit counts, and else is a share of the machine
run() { .venv/bin/python -m pytest "${selection[@]}" --durations=15 --junitxml="outputs/$1.xml" "${@:2}"; }
on() { if [ "$slow" = yes ]; then bash scripts/upkeep/run_tests_transformers.sh "$1"; fi; }
second() {
  .venv/bin/mypy
  run tests_second "${rooms[@]}"
  on lowest
}

if [ $# -gt 0 ]; then
  .venv/bin/mypy
  run tests "$@"
  exit
fi
# All of them, in two processes for two cores: these rooms and mypy take about half of the time.
rooms=(tests/engine tests/options tests/config)
mkdir -p outputs
second > outputs/tests_second.log 2>&1 & other=$!
trap 'pkill -P "$other" 2>/dev/null || true' EXIT # an interrupt does not reach what runs behind
failed=no
run tests_first tests "${rooms[@]/#/--ignore=}" || failed=yes
on highest || failed=yes
wait "$other" || failed=yes
cat outputs/tests_second.log
[ "$failed" = no ]
