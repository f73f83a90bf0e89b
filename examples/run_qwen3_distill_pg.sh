#!/usr/bin/env bash
# On-policy distillation: a student learns from what a teacher says of its responses, every shared prompt computed once.
#
#   bash examples/run_qwen3_distill_pg.sh [verl override ...]
#
# Takes the variables of run_qwen3_pg.sh, whose MODEL_PATH is the student; trains a few minutes on the CPU without any.
# actor/distillation/abs_loss is the estimate of the KL divergence. Beside them:
#   TEACHER_PATH          generated on the CPU default, else needed
#   TEACHER_GPUS          1, in addition to NGPUS_PER_NODE
#   LOSS_MODE             k3; forward_kl_topk needs vllm or sglang
#   USE_POLICY_GRADIENT   False; with LOSS_MODE=k1 it must be True
#   USE_TASK_REWARDS      False
set -euo pipefail
export EXAMPLE=${BASH_SOURCE[0]}

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export USE_PREFIX_GROUPER=True
export WORK_DIR=${WORK_DIR:-outputs/run_qwen3_distill_pg}
case " $* " in *" --help "* | *" -h "*) exec bash "$repository/examples/run_qwen3_pg.sh" --help ;; esac
TEACHER_GPUS=${TEACHER_GPUS:-1}
if [ -z "${MODEL_PATH:-}${TRAIN_FILES:-}${VAL_FILES:-}" ]; then
    bash "$repository/scripts/install.sh"
    DEVICE=cpu
    export TOTAL_STEPS=${TOTAL_STEPS:-20}
    TEACHER_PATH=${TEACHER_PATH:-$WORK_DIR/teacher}
    [ -d "$TEACHER_PATH" ] || "$repository/.venv/bin/python" "$repository/scripts/make_tiny_checkpoint.py" \
        --output-dir "$TEACHER_PATH" --warm-up-steps 160 --seed 1
    TEACHER_PATH=$(cd "$TEACHER_PATH" && pwd)
fi
DEVICE_ARGS=()
if [ "${DEVICE:-gpu}" = cpu ]; then
    # Ray's GPUs are worker processes there, and the teacher is one.
    DEVICE_ARGS=("++ray_kwargs.ray_init.num_gpus=$((${NGPUS_PER_NODE:-1} + TEACHER_GPUS))")
fi
exec bash "$repository/examples/run_qwen3_pg.sh" \
    trainer.experiment_name=run_qwen3_distill_pg \
    actor_rollout_ref.actor.use_kl_loss=False \
    distillation.enabled=True \
    distillation.nnodes=1 \
    distillation.n_gpus_per_node="$TEACHER_GPUS" \
    distillation.teacher_models.teacher_model.model_path="${TEACHER_PATH:?set it to the teacher, a checkpoint or its name}" \
    distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1 \
    distillation.distillation_loss.loss_mode="${LOSS_MODE:-k3}" \
    distillation.distillation_loss.use_policy_gradient="${USE_POLICY_GRADIENT:-False}" \
    distillation.distillation_loss.use_task_rewards="${USE_TASK_REWARDS:-False}" \
    "${DEVICE_ARGS[@]}" \
    "$@"
