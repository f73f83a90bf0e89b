#!/usr/bin/env bash
# Lint, format check, type check and tests; installs into .venv first if needed. A short selection of the tests runs a
# second time, on the lowest supported transformers: .venv has the highest. With PYTEST_ARGS, those tests alone.
#
#   bash scripts/run_tests.sh [--slow] [--skip-lowest] [PYTEST_ARGS ...]      # e.g. tests/layout -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not slow") lowest=yes
while true; do
  case ${1:-} in
    --slow) selection=() ;;
    --skip-lowest) lowest=no ;;
    *) break ;;
  esac
  shift
done
bash scripts/install.sh

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# One thread: on two cores, tiny models and two-process tests are slower when they fight over threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
run() { .venv/bin/python -m pytest "${selection[@]}" --durations=15 --junitxml="outputs/$1.xml" "${@:2}"; }
second() {
  run tests_second "${rooms[@]}"
  if [ "$lowest" = yes ]; then bash scripts/upkeep/run_tests_lowest.sh; fi
}

if [ $# -gt 0 ]; then
  run tests "$@"
  exit
fi
# All of them, in two processes for two cores: these rooms and the lowest transformers take about half of the time.
rooms=(tests/engine tests/options tests/planning tests/layout tests/config tests/cli)
mkdir -p outputs
second > outputs/tests_second.log 2>&1 & other=$!
trap 'pkill -P "$other" 2>/dev/null || true' EXIT # an interrupt does not reach what runs behind
failed=no
run tests_first tests "${rooms[@]/#/--ignore=}" || failed=yes
wait "$other" || failed=yes
cat outputs/tests_second.log
[ "$failed" = no ]
