#!/usr/bin/env bash
# GRPO with upstream's PrefixGrouper in two padded attention passes (prefix_grouper mode).
#
#   bash examples/run_qwen3_prefix_grouper.sh [verl override ...]
#
# Takes the variables of run_qwen3_pg.sh; trains a few minutes on the CPU without any. The mode needs whole groups in
# micro-batches of a fixed number of sequences: GROUPS_PER_MICRO_BATCH groups of ROLLOUT_N responses.
set -euo pipefail
export EXAMPLE=${BASH_SOURCE[0]}

export USE_PREFIX_GROUPER=True USE_REMOVE_PADDING=False
export WORK_DIR=${WORK_DIR:-outputs/run_qwen3_prefix_grouper}
export ROLLOUT_N=${ROLLOUT_N:-8}
if [ -z "${MODEL_PATH:-}${TRAIN_FILES:-}${VAL_FILES:-}" ]; then
    export TOTAL_STEPS=${TOTAL_STEPS:-20}
    GROUPS_PER_MICRO_BATCH=${GROUPS_PER_MICRO_BATCH:-8}
fi
MICRO_BATCH_SIZE=$((${GROUPS_PER_MICRO_BATCH:-1} * ROLLOUT_N))
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen3_pg.sh" \
    trainer.experiment_name=run_qwen3_prefix_grouper \
    trainer.balance_batch=False \
    actor_rollout_ref.actor.use_dynamic_bsz=False \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE" \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE" \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE" \
    "$@"
