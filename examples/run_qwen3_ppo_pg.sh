#!/usr/bin/env bash
# PPO: actor, reference policy and critic compute every shared prompt once (packed mode), advantages by GAE.
#
#   bash examples/run_qwen3_ppo_pg.sh [verl override ...]
#
# Takes the variables of run_qwen3_pg.sh; trains a few minutes on the CPU without any. The critic starts from the
# actor's checkpoint with a new value head; CRITIC_PATH names another one, of a token classifier with one label.
set -euo pipefail
export EXAMPLE=${BASH_SOURCE[0]}

export USE_PREFIX_GROUPER=True
export WORK_DIR=${WORK_DIR:-outputs/run_qwen3_ppo_pg}
if [ -z "${MODEL_PATH:-}${TRAIN_FILES:-}${VAL_FILES:-}" ]; then
    DEVICE=cpu
    export TOTAL_STEPS=${TOTAL_STEPS:-20}
    CRITIC_LR=${CRITIC_LR:-1e-3}
fi
DEVICE_ARGS=()
if [ "${DEVICE:-gpu}" = cpu ]; then
    DEVICE_ARGS=(
        critic.model.enable_gradient_checkpointing=False
        +critic.model.override_config.attn_implementation=sdpa
        "+critic.fsdp.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
        critic.fsdp.use_torch_compile=False
    )
fi
# verl's V1 trainer takes the critic's token budget from ppo_infer_max_token_len_per_gpu, in the update too.
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen3_pg.sh" \
    trainer.experiment_name=run_qwen3_ppo_pg \
    algorithm.adv_estimator=gae \
    critic.model.path="${CRITIC_PATH:-\${actor_rollout_ref.model.path\}}" \
    critic.strategy=fsdp2 \
    critic.optim.lr="${CRITIC_LR:-1e-5}" \
    +critic.ppo_infer_max_token_len_per_gpu="${MAX_TOKEN_LEN:-20480}" \
    "${DEVICE_ARGS[@]}" \
    "$@"
