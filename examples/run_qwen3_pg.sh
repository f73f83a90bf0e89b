#!/usr/bin/env bash
# GRPO with every shared prompt computed once and no padding (packed mode).
#
#   bash examples/run_qwen3_pg.sh [--help] [verl override ...]
#
# Without any variable set: installs into .venv, makes a tiny Qwen3 checkpoint and an arithmetic data set, and
# trains on the CPU: about twelve minutes in all. The last line is `run summary: {json}`.
#
# With MODEL_PATH, TRAIN_FILES and VAL_FILES set, the same training on GPUs; what the machine lacks for it is said
# before anything starts:
#
#   MODEL_PATH=Qwen/Qwen3-4B TRAIN_FILES=~/data/gsm8k/train.parquet VAL_FILES=~/data/gsm8k/test.parquet \
#       NGPUS_PER_NODE=8 bash examples/run_qwen3_pg.sh
#
# Transformers' own model classes need no patch. To train the patched Qwen3 file of this package instead, either
#   A) install it in the checkpoint and trust it:
#        python -m verl_pg_plugin patch-model CHECKPOINT_DIR
#        MODEL_PATH=CHECKPOINT_DIR ... bash examples/run_qwen3_pg.sh actor_rollout_ref.model.trust_remote_code=True
#   B) register its class in every worker, no file copied:
#        bash examples/run_qwen3_pg.sh \
#            actor_rollout_ref.model.external_lib=verl_pg_plugin.models.register_on_import
#
# Variables, with their values on the CPU default and on GPUs:
#   MODEL_PATH, TRAIN_FILES, VAL_FILES   generated               all three or none
#   ARCHITECTURE                         qwen3                   - ; of the generated model; also qwen3_moe, qwen3_5_text
#   ENTRY_POINT                          verl_pg_plugin.main_ppo; verl.trainer.main_ppo does the same with the plugin there
#   DEVICE                               cpu                     gpu; cpu takes MODEL_PATH and the files as well
#   PYTHON                               .venv                   .venv if there is one, else python3
#   WORK_DIR                             outputs/run_qwen3_pg    the same; each run gets a folder in it
#   USE_PREFIX_GROUPER                   True                    True: the one flag of packed mode; False selects rmpad
#   USE_REMOVE_PADDING                   -                       - : verl's own True; False pads, with USE_PREFIX_GROUPER=False
#   NGPUS_PER_NODE, NNODES               1, 1 (processes)        8, 1
#   ROLLOUT, ROLLOUT_N, ROLLOUT_TP       hf, 8, 1                vllm, 8, 1
#   GPU_MEMORY_UTILIZATION               -                       0.6: what vLLM takes of a GPU
#   TRAIN_BATCH_SIZE                     16 (prompts)            256
#   PPO_MINI_BATCH_SIZE                  8 (prompts)             64
#   MAX_PROMPT_LENGTH                    256 (tokens)            4096
#   MAX_RESPONSE_LENGTH                  8                       2048
#   MAX_TOKEN_LEN                        8192                    20480: budget of a micro-batch, per GPU
#   REF_MAX_TOKEN_LEN                    4 x MAX_TOKEN_LEN       the same: that of the reference policy, whose weights come
#                                                                from the host for every micro-batch; without sharing 1 x
#   LR                                   3e-4                    1e-6
#   TOTAL_STEPS, TOTAL_EPOCHS            40, 100                 null, 15
#   SAVE_FREQ, TEST_FREQ                 -1, -1 (never)          20, 5: steps between two checkpoints, two validations
#   RESUME_MODE                          disable                 auto: goes on from the last checkpoint in
#   CHECKPOINT_DIR                       of the run's folder     checkpoints in WORK_DIR, the same in each run
#   VERL_FILE_LOGGER_PATH                metrics.jsonl in the folder of the run, for the summary
#   TENSORBOARD_DIR                      tensorboard in the folder of the run, with trainer.logger=[...,tensorboard]
# Overrides come last and win.
case " $* " in
    *" --help "* | *" -h "*)
        for script in ${EXAMPLE:+"$EXAMPLE"} "${BASH_SOURCE[0]}"; do # of the example that runs this one, too
            sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$script"
        done
        exit 0
        ;;
esac
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { echo "error: $*" >&2; exit 1; }

WORK_DIR=${WORK_DIR:-outputs/run_qwen3_pg}
mkdir -p "$WORK_DIR"
WORK_DIR=$(cd "$WORK_DIR" && pwd)
# A new folder for each run; checkpoints on GPUs are those of the model and the mode, see CHECKPOINT_DIR.
RUN_DIR=$(mktemp -d "$WORK_DIR/$(date +%Y%m%d-%H%M%S)-XXXX")

USE_PREFIX_GROUPER=${USE_PREFIX_GROUPER:-True}
case $USE_PREFIX_GROUPER in True | False) ;; *) fail "USE_PREFIX_GROUPER=$USE_PREFIX_GROUPER is neither True nor False" ;; esac

################################ model and data ################################
if [ -z "${MODEL_PATH:-}${TRAIN_FILES:-}${VAL_FILES:-}" ]; then
    DEVICE=cpu
    bash "$repository/scripts/install.sh"
    PYTHON=$repository/.venv/bin/python
    ARCHITECTURE=${ARCHITECTURE:-qwen3}
    MODEL_PATH=$WORK_DIR/model-$ARCHITECTURE
    TRAIN_FILES=$WORK_DIR/data/train.parquet
    VAL_FILES=$WORK_DIR/data/test.parquet
    [ -d "$WORK_DIR/data" ] ||
        "$PYTHON" "$repository/scripts/make_arithmetic_data.py" --output-dir "$WORK_DIR/data"
    [ -d "$MODEL_PATH" ] ||
        "$PYTHON" "$repository/scripts/make_tiny_checkpoint.py" --output-dir "$MODEL_PATH" \
            --architecture "$ARCHITECTURE"
else
    DEVICE=${DEVICE:-gpu}
    PYTHON=${PYTHON:-$([ -x "$repository/.venv/bin/python" ] && echo "$repository/.venv/bin/python" || echo python3)}
    for name in MODEL_PATH TRAIN_FILES VAL_FILES; do
        [ -n "${!name:-}" ] || fail "$name is not set: set MODEL_PATH, TRAIN_FILES and VAL_FILES, or none of them"
    done
fi
for file in "$TRAIN_FILES" "$VAL_FILES"; do
    case $file in
        \[* | *://*) ;; # a Hydra list or a remote file: verl reads it
        *) [ -f "$file" ] || fail "data file $file does not exist: correct TRAIN_FILES or VAL_FILES" ;;
    esac
done

case $DEVICE in
    cpu | gpu) ;;
    *) fail "DEVICE=$DEVICE is neither cpu nor gpu" ;;
esac

################################ what differs by device ################################
if [ "$DEVICE" = cpu ]; then
    NGPUS_PER_NODE=${NGPUS_PER_NODE:-1} # worker processes
    NNODES=${NNODES:-1}
    export VERL_PLATFORM=cpu
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + NGPUS_PER_NODE - 1) / NGPUS_PER_NODE))}
    DEVICE_ARGS=(
        # Float32, sdpa, few processes, and a separate Ray: config/hydra/machine/cpu.yaml of the package.
        "hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_pg_plugin.config.hydra]"
        +machine=cpu
        reward.custom_reward_function.path="$repository/scripts/data/arithmetic_reward.py"
    )
    ROLLOUT=${ROLLOUT:-hf} ROLLOUT_N=${ROLLOUT_N:-8} ROLLOUT_TP=${ROLLOUT_TP:-1}
    TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16} PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-8}
    MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-256} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8}
    MAX_TOKEN_LEN=${MAX_TOKEN_LEN:-8192}
    LR=${LR:-3e-4} TOTAL_STEPS=${TOTAL_STEPS:-40} TOTAL_EPOCHS=${TOTAL_EPOCHS:-100}
    SAVE_FREQ=${SAVE_FREQ:--1} TEST_FREQ=${TEST_FREQ:--1} RESUME_MODE=${RESUME_MODE:-disable}
    CHECKPOINT_DIR=${CHECKPOINT_DIR:-$RUN_DIR/checkpoints}
else
    NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
    NNODES=${NNODES:-1}
    DEVICE_ARGS=(
        # A batch of prompts is a few rows of a file. Worker processes of the data loader would only be killed at the
        # end, with a traceback for each.
        data.dataloader_num_workers=0
        actor_rollout_ref.model.enable_gradient_checkpointing=True
        actor_rollout_ref.rollout.gpu_memory_utilization="${GPU_MEMORY_UTILIZATION:-0.6}"
    )
    ROLLOUT=${ROLLOUT:-vllm} ROLLOUT_N=${ROLLOUT_N:-8} ROLLOUT_TP=${ROLLOUT_TP:-1}
    TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-256} PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-64}
    MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-4096} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-2048}
    MAX_TOKEN_LEN=${MAX_TOKEN_LEN:-20480}
    LR=${LR:-1e-6} TOTAL_STEPS=${TOTAL_STEPS:-null} TOTAL_EPOCHS=${TOTAL_EPOCHS:-15}
    # As in verl's examples.
    SAVE_FREQ=${SAVE_FREQ:-20} TEST_FREQ=${TEST_FREQ:-5} RESUME_MODE=${RESUME_MODE:-auto}
    mode=$([ "$USE_PREFIX_GROUPER" = True ] && echo packed || echo rmpad)
    CHECKPOINT_DIR=${CHECKPOINT_DIR:-$WORK_DIR/checkpoints/$(basename "$MODEL_PATH")-$mode}
    if [ "$RESUME_MODE" = auto ] && [ -s "$CHECKPOINT_DIR/latest_checkpointed_iteration.txt" ]; then
        step=$(cat "$CHECKPOINT_DIR/latest_checkpointed_iteration.txt")
        echo "Resuming from step $step in $CHECKPOINT_DIR; RESUME_MODE=disable starts from scratch" >&2
    fi
fi

case $MAX_TOKEN_LEN in *[!0-9]*) fail "MAX_TOKEN_LEN=$MAX_TOKEN_LEN is not a number of tokens" ;; esac
REF_TIMES=$([ "$USE_PREFIX_GROUPER" = True ] && echo 4 || echo 1)
REF_MAX_TOKEN_LEN=${REF_MAX_TOKEN_LEN:-$((REF_TIMES * MAX_TOKEN_LEN))}

################################ training ################################
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$RUN_DIR/metrics.jsonl}
export TENSORBOARD_DIR=${TENSORBOARD_DIR:-$RUN_DIR/tensorboard}

"$PYTHON" -m "${ENTRY_POINT:-verl_pg_plugin.main_ppo}" \
    hydra.run.dir="$RUN_DIR" \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size="$TRAIN_BATCH_SIZE" \
    data.max_prompt_length="$MAX_PROMPT_LENGTH" \
    data.max_response_length="$MAX_RESPONSE_LENGTH" \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.use_prefix_grouper="$USE_PREFIX_GROUPER" \
    ${USE_REMOVE_PADDING:+actor_rollout_ref.model.use_remove_padding="$USE_REMOVE_PADDING"} \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr="$LR" \
    actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE" \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKEN_LEN" \
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="$REF_MAX_TOKEN_LEN" \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.name="$ROLLOUT" \
    actor_rollout_ref.rollout.n="$ROLLOUT_N" \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP" \
    trainer.nnodes="$NNODES" \
    trainer.n_gpus_per_node="$NGPUS_PER_NODE" \
    trainer.total_epochs="$TOTAL_EPOCHS" \
    trainer.total_training_steps="$TOTAL_STEPS" \
    trainer.logger='["console","file"]' \
    trainer.project_name=verl_pg_plugin \
    trainer.experiment_name=run_qwen3_pg \
    trainer.val_before_train=False \
    trainer.test_freq="$TEST_FREQ" \
    trainer.save_freq="$SAVE_FREQ" \
    trainer.default_local_dir="$CHECKPOINT_DIR" \
    trainer.resume_mode="$RESUME_MODE" \
    "${DEVICE_ARGS[@]}" \
    "$@"

"$PYTHON" "$repository/scripts/run_summary.py" "$VERL_FILE_LOGGER_PATH" --config "$RUN_DIR/.hydra/config.yaml"
