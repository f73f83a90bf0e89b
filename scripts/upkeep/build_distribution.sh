#!/usr/bin/env bash
# Build sdist and wheel, check them, and install the wheel and the sdist into environments that have nothing else.
#
#   bash scripts/upkeep/build_distribution.sh FOLDER      # FOLDER is emptied; PYTHON=... picks the interpreter
set -euo pipefail
folder=$(realpath -m "${1:?usage: build_distribution.sh FOLDER}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m venv "$scratch/tools"
"$scratch/tools/bin/python" -m pip install --quiet build twine
rm -rf "$folder"
"$scratch/tools/bin/python" -m build --outdir "$folder" .
"$scratch/tools/bin/python" -m twine check --strict "$folder"/*

# What needs no other package must run from both; the sdist has all that its tests need.
for distribution in "$folder"/*.whl "$folder"/*.tar.gz; do
  "$python" -m venv --clear "$scratch/fresh"
  "$scratch/fresh/bin/python" -m pip install --quiet packaging
  "$scratch/fresh/bin/python" -m pip install --quiet --no-deps --no-warn-conflicts "$distribution"
  (cd "$scratch" && fresh/bin/python -m verl_pg_plugin --version)
done
tar -tzf "$folder"/*.tar.gz > "$scratch/files"
for needed in tests/conftest.py scripts/run_tests.sh examples/run_qwen3_pg.sh docs/support.md constraints.txt; do
  grep -q "/$needed$" "$scratch/files" || { echo "error: the sdist lacks $needed" >&2; exit 1; }
done
