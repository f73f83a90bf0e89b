"""Settings of trainings of the tiny checkpoint, on a GPU with vLLM or on a CPU."""

import sys
from pathlib import Path

from benchmarks.step_runs import FEW_PROCESSES, REPOSITORY

HEAD_DIM = {"cpu": 32, "gpu": 64}  # flash-attn and vLLM do not support 32 on every GPU
MAX_TOKEN_LEN = {"cpu": 1024, "gpu": 8192}  # on a CPU, stock verl's attention mask is dense over a micro-batch


def tiny_environment(device: str, work_dir: Path, model_path: Path, data_dir: Path) -> dict[str, str]:
    """Return environment variables of the scripts in ``examples/``; ``device`` is "gpu" or "cpu"."""
    return {
        "DEVICE": device,
        "PYTHON": sys.executable,
        "WORK_DIR": str(work_dir),
        "MODEL_PATH": str(model_path),
        "TRAIN_FILES": str(data_dir / "train.parquet"),
        "VAL_FILES": str(data_dir / "test.parquet"),
        "NGPUS_PER_NODE": "1",
        "ROLLOUT_N": "8",
        "MAX_PROMPT_LENGTH": "256",
        "MAX_RESPONSE_LENGTH": "8",
        "MAX_TOKEN_LEN": str(MAX_TOKEN_LEN[device]),
        "GPU_MEMORY_UTILIZATION": "0.2",
        "LR": "3e-4",
        "TOTAL_EPOCHS": "100",
    }


def tiny_overrides(device: str) -> list[str]:
    """Return the overrides of a small GPU run; on a CPU, the plugin sets them itself."""
    if device == "cpu":
        return []
    return [
        f"reward.custom_reward_function.path={REPOSITORY / 'scripts' / 'data' / 'arithmetic_reward.py'}",
        *FEW_PROCESSES,
        "actor_rollout_ref.rollout.enforce_eager=True",
        "++ray_kwargs.ray_init.address=local",
        # verl polls for responses every two seconds, longer than a step of this model.
        "trainer.v1.sampler.custom_sampler.path=pkg://verl_pg_plugin.rollout.replay_buffer",
        "trainer.v1.sampler.custom_sampler.name=prompt_replay_buffer",
    ]
