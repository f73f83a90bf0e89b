#!/usr/bin/env bash
# Install the plugin, verl and its tools into .venv beside this repository's README.
#
#   bash scripts/install.sh [EXTRA ...]      # default extras: cpu dev
#
# Does nothing when .venv already holds this very set of requirements. PYTHON=... picks the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=$(IFS=,; echo "${*:-cpu,dev}"); extras=${extras// /,}
stamp="$extras $(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)"
if [ -x .venv/bin/python ] && [ "$(cat .venv/.installed 2>/dev/null)" = "$stamp" ]; then exit 0; fi

supported='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))'
python=${PYTHON:-}
for candidate in python3 python3.11 python3.12 python3.10; do
  [ -n "$python" ] && break
  if command -v "$candidate" >/dev/null && "$candidate" -c "$supported" 2>/dev/null; then python=$candidate; fi
done
if [ -z "$python" ] || ! "$python" -c "$supported"; then
  echo "error: Python 3.10, 3.11 or 3.12 is needed; install one or name it: PYTHON=/path/to/python3.11 bash $0" >&2
  exit 1
fi
echo "installing verl-pg-plugin[$extras] into .venv (about two minutes)" >&2
# A half-made environment (no ensurepip) has a python and no pip.
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$extras]"
if [[ ",$extras," = *,dev,* ]] && .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  # For verl's VeOmni engine, which one test imports, without the rest of what it asks for.
  .venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps --upgrade --target .venv/veomni \
    veomni blobfile timm tiktoken
fi
echo "$stamp" > .venv/.installed
