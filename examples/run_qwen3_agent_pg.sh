#!/usr/bin/env bash
# GRPO on sessions with one sequence per turn: its prompt is the conversation so far, and all sequences of a session, and
# all sessions of a prompt, are one prefix tree that is computed once.
#
#   bash examples/run_qwen3_agent_pg.sh [verl override ...]
#
# Takes the variables of run_qwen3_pg.sh; trains ten minutes on the CPU without any. The agent loop is
# scripts/data/turnwise_agent_loop.py; AGENT_LOOP_CONFIG names another list of agent loops, whose first is taken by
# actor_rollout_ref.rollout.agent.default_agent_loop=NAME. Sessions have different numbers of turns: verl fills up its
# mini-batches with copies of one short sequence, which cost next to nothing here.
set -euo pipefail
export EXAMPLE=${BASH_SOURCE[0]}

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export USE_PREFIX_GROUPER=${USE_PREFIX_GROUPER:-True}
export WORK_DIR=${WORK_DIR:-outputs/run_qwen3_agent_pg}
export PYTHONPATH=$repository/scripts/data${PYTHONPATH:+:$PYTHONPATH}
if [ -z "${MODEL_PATH:-}${TRAIN_FILES:-}${VAL_FILES:-}" ]; then
    export TOTAL_STEPS=${TOTAL_STEPS:-60} MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-512}
    # A session is several sequences, so a step is several optimizer steps.
    export LR=${LR:-1e-4}
    set -- reward.custom_reward_function.name=compute_score_of_tries "$@"
fi
exec bash "$repository/examples/run_qwen3_pg.sh" \
    trainer.experiment_name=run_qwen3_agent_pg \
    data.return_raw_chat=True \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="${AGENT_LOOP_CONFIG:-$repository/scripts/data/turnwise_agent_loop.yaml}" \
    actor_rollout_ref.rollout.agent.default_agent_loop=turnwise_agent \
    "$@"
