#!/usr/bin/env bash
# What depends most on transformers, under the lowest or the highest version that pyproject.toml names: the names that we
# build on, and exactness in every architecture. Images are left out on the highest, which verl's own patches of image
# models do not know yet.
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
  lowest) sign='>=' images=(tests/modalities/test_images.py::test_images_match_single_sequences) ;;
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
# VeOmni supports other versions. How groups and responses are split, and long prompts, are the plugin's own matter.
.venv/bin/python -m pytest -m "not slow" --durations=15 \
  -k "not veomni and not ranks_match and not 4096 and not (test_images and (turns or forks or split))" \
  tests/test_compat.py tests/models/test_forward.py \
  tests/mixers/test_mixers.py::test_a_mixer_of_twenty_lines_is_exact \
  tests/mixers/test_gated_delta.py::test_hybrids_match_single_sequences \
  tests/mixers/test_mamba2.py::test_hybrids_match_single_sequences \
  tests/mixers/test_mamba2.py::test_variants_match_single_sequences \
  tests/engine/test_compiled_layers.py::test_compiled_layers_are_exact_in_split_groups_and_compile_once \
  tests/engine/test_exactness.py::test_every_way_to_run_experts_is_exact \
  tests/engine/test_exactness.py::test_windows_and_long_sequences_are_exact_or_refused \
  tests/architectures/test_record.py tests/architectures/test_compiled_layers.py \
  tests/architectures/test_every_model.py::test_accepted_types_are_exact \
  tests/architectures/test_every_model.py::test_types_not_run_cannot_be_built \
  tests/architectures/test_every_model.py::test_fused_kernels_are_exact_or_refused "${images[@]}" "$@"
