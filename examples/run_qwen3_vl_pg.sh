#!/usr/bin/env bash
# GRPO on images: each distinct image goes through the vision encoder once per micro-batch, and its tokens through every
# layer once for all responses of its group.
#
#   bash examples/run_qwen3_vl_pg.sh [verl override ...]
#
# Takes the variables of run_qwen3_pg.sh. Without any it makes a tiny Qwen3-VL checkpoint and images of coloured squares
# and trains a few minutes on the CPU to count them; the rollout sees the images. With MODEL_PATH and files of a data
# set with images, Qwen3-VL or Qwen2.5-VL on GPUs with vLLM; verl's data set wants qwen-vl-utils and torchvision there:
#
#   MODEL_PATH=Qwen/Qwen3-VL-4B-Instruct TRAIN_FILES=~/data/geo3k/train.parquet VAL_FILES=~/data/geo3k/test.parquet \
#       NGPUS_PER_NODE=8 bash examples/run_qwen3_vl_pg.sh
set -euo pipefail
export EXAMPLE=${BASH_SOURCE[0]}

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export USE_PREFIX_GROUPER=True
export WORK_DIR=${WORK_DIR:-outputs/run_qwen3_vl_pg}
case " $* " in *" --help "* | *" -h "*) exec bash "$repository/examples/run_qwen3_pg.sh" --help ;; esac
overrides=(trainer.experiment_name=run_qwen3_vl_pg data.image_key=images)
if [ -z "${MODEL_PATH:-}${TRAIN_FILES:-}${VAL_FILES:-}" ]; then
    bash "$repository/scripts/install.sh"
    export DEVICE=cpu PYTHON=$repository/.venv/bin/python VERL_PLATFORM=cpu
    export MODEL_PATH=$WORK_DIR/model TRAIN_FILES=$WORK_DIR/data/train.parquet VAL_FILES=$WORK_DIR/data/test.parquet
    export LR=${LR:-4e-4} TOTAL_STEPS=${TOTAL_STEPS:-30} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4}
    [ -d "$WORK_DIR/data" ] ||
        "$PYTHON" "$repository/scripts/make_image_task.py" --data "$WORK_DIR/data"
    [ -d "$MODEL_PATH" ] ||
        "$PYTHON" "$repository/scripts/make_image_task.py" --model "$MODEL_PATH"
    overrides+=(
        data.custom_cls.path=pkg://verl_pg_plugin.cpu.image_dataset
        data.custom_cls.name=ImageDataset
    )
fi
exec bash "$repository/examples/run_qwen3_pg.sh" "${overrides[@]}" "$@"
