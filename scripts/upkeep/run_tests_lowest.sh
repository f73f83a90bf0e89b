#!/usr/bin/env bash
# What depends most on transformers, under the lowest version that pyproject.toml allows: exactness of the engine in
# every architecture, our model files, attention inside stock models, and the parts of transformers that we build on.
#
#   bash scripts/upkeep/run_tests_lowest.sh [PYTEST_ARGS ...]
#
# The version is installed once, into .venv-lowest; everything else comes from .venv, which scripts/install.sh makes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
lowest=$(sed -n 's/^ *"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
folder=$PWD/.venv-lowest
if [ ! -d "$folder/transformers-$lowest.dist-info" ]; then
  echo "installing transformers $lowest into $folder" >&2
  rm -rf "$folder"
  # Without dependencies: those in .venv are within its ranges, and transformers checks them when it is imported.
  .venv/bin/python -m pip install --quiet --no-deps --target "$folder" "transformers==$lowest"
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
.venv/bin/python -c "import transformers as t; assert t.__version__ == '$lowest', t.__file__"
echo "tests on transformers $lowest" >&2
.venv/bin/python -m pytest -m "not slow" \
  tests/test_compat.py tests/attention/test_models.py tests/models/test_forward.py \
  tests/mixers/test_engine.py \
  tests/architectures \
  tests/modalities/test_images.py tests/modalities/test_bad_images.py \
  tests/engine/test_exactness.py -k "not test_exactness or architectures or sliding_window or every_token" "$@"
