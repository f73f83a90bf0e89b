#!/usr/bin/env bash
# What depends most on transformers, under the lowest or the highest version that pyproject.toml names: exactness of the
# engine in every architecture, our model files, mixers inside stock models, graphs of compiled layers, and the names that
# we build on. Images are left out on the highest, which verl's own patches of image models do not know yet. So is what
# the layout, the planner, several ranks and the engine's options do, and critics, whose layers are those of the other models.
#
#   bash scripts/upkeep/run_tests_transformers.sh lowest|highest [PYTEST_ARGS ...]
#
# It and its tokenizers are installed once, into .venv-lowest or .venv-highest; everything else comes from .venv, which
# scripts/install.sh makes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
which=$1 images=()
shift
case $which in
  lowest) sign='>=' images=(tests/modalities/test_images.py tests/modalities/test_bad_images.py) ;;
  highest) sign='<=' ;;
esac
version=$(sed -n "s/.*\"transformers$sign\([0-9.]*\).*/\1/p" pyproject.toml)
folder=$PWD/.venv-$which
if [ ! -d "$folder/transformers-$version.dist-info" ]; then
  echo "installing transformers $version into $folder" >&2
  rm -rf "$folder"
  # Without dependencies: all but one in .venv are within its ranges, and transformers checks them when it is imported.
  install() { .venv/bin/python -m pip install --quiet --no-deps --target "$folder" "$1"; }
  install "transformers==$version"
  install "$(sed -n 's/^Requires-Dist: \(tokenizers[^;]*\)$/\1/p' "$folder/transformers-$version.dist-info/METADATA")"
fi

if ! command -v nvidia-smi >/dev/null; then ulimit -v 16000000; fi # one model type once took 22 GB
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
.venv/bin/python -c "import transformers as t; assert t.__version__ == '$version', t.__file__"
echo "tests on transformers $version" >&2
leave_out="veomni or test_critics or any_trie or carry_nothing" # VeOmni has a range of its own
leave_out+=" or two_ranks or every_rank or over_ranks or waits_for_nobody"
leave_out+=" or (test_compiled_layers and not compile_once)"
leave_out+=" or (test_gated_delta and groups_are_exact) or (test_images and (every_option or verify_mode))"
leave_out+=" or (test_exactness and not (every_way or windows or uneven_groups))"
.venv/bin/python -m pytest -m "not slow" \
  tests/test_compat.py tests/models/test_forward.py \
  tests/mixers/test_mixers.py tests/mixers/test_gated_delta.py tests/mixers/test_mamba2.py \
  tests/engine/test_compiled_layers.py \
  tests/architectures "${images[@]}" \
  tests/engine/test_exactness.py \
  -k "not ($leave_out)" "$@"
