#!/usr/bin/env bash
# GRPO with stock verl and no padding (rmpad mode): examples/run_qwen3_pg.sh without shared prefixes.
#
#   bash examples/run_qwen3_rmpad.sh [verl override ...]
#
# Takes the variables of run_qwen3_pg.sh. Without any it runs a few small steps on the CPU: there, verl attends over a
# dense mask of all packed tokens, which is slow.
set -euo pipefail
export EXAMPLE=${BASH_SOURCE[0]}

export USE_PREFIX_GROUPER=False
export WORK_DIR=${WORK_DIR:-outputs/run_qwen3_rmpad}
if [ -z "${MODEL_PATH:-}${TRAIN_FILES:-}${VAL_FILES:-}" ]; then
    export TOTAL_STEPS=${TOTAL_STEPS:-3} TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-4}
    export PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-2} MAX_TOKEN_LEN=${MAX_TOKEN_LEN:-1024}
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen3_pg.sh" trainer.experiment_name=run_qwen3_rmpad "$@"
