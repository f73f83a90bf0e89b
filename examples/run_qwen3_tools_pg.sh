#!/usr/bin/env bash
# GRPO with several turns and a tool: verl's ToolAgentLoop, a calculator, and every shared prompt computed once.
#
#   bash examples/run_qwen3_tools_pg.sh [verl override ...]
#
# Takes the variables of run_qwen3_pg.sh; trains a few minutes on the CPU without any, on a checkpoint that was fitted
# to call the tool. What the tool returns is part of the sequence and of no loss. TOOL_PATH names a Python file of your
# own with functions under verl's @function_tool; the calls are read in Qwen's format (<tool_call>{json}</tool_call>).
set -euo pipefail
export EXAMPLE=${BASH_SOURCE[0]}

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export USE_PREFIX_GROUPER=True
export WORK_DIR=${WORK_DIR:-outputs/run_qwen3_tools_pg}
case " $* " in *" --help "* | *" -h "*) exec bash "$repository/examples/run_qwen3_pg.sh" --help ;; esac
if [ -z "${MODEL_PATH:-}${TRAIN_FILES:-}${VAL_FILES:-}" ]; then
    bash "$repository/scripts/install.sh"
    export DEVICE=cpu PYTHON=$repository/.venv/bin/python
    export MODEL_PATH=$WORK_DIR/model TRAIN_FILES=$WORK_DIR/data/train.parquet VAL_FILES=$WORK_DIR/data/test.parquet
    export TOTAL_STEPS=${TOTAL_STEPS:-20} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-96}
    [ -d "$WORK_DIR/data" ] ||
        "$PYTHON" "$repository/scripts/make_arithmetic_data.py" --output-dir "$WORK_DIR/data"
    [ -d "$MODEL_PATH" ] ||
        "$PYTHON" "$repository/scripts/make_tiny_checkpoint.py" --output-dir "$MODEL_PATH" --tool-calls
fi
exec bash "$repository/examples/run_qwen3_pg.sh" \
    trainer.experiment_name=run_qwen3_tools_pg \
    data.return_raw_chat=True \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.format=hermes \
    actor_rollout_ref.rollout.multi_turn.function_tool_path="${TOOL_PATH:-$repository/scripts/data/calculator_tool.py}" \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4 \
    actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
    "$@"
