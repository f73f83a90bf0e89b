"""What trainings of the tiny checkpoint share, on a GPU with vLLM or on the CPU default: sizes and a short start-up."""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# flash-attn and vLLM take both on every GPU; 32 is compiled for fewer.
HEAD_DIM = {"cpu": 32, "gpu": 64}
# On a CPU, stock verl attends over a dense mask of all packed tokens: a small budget is the fast one.
MAX_TOKEN_LEN = {"cpu": 1024, "gpu": 8192}


def tiny_environment(device: str, work_dir: Path, model_path: Path, data_dir: Path) -> dict[str, str]:
    """What the scripts in ``examples/`` read; ``device`` is "gpu" or "cpu"."""
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
    """What the CPU default sets by itself and a GPU run of this size needs: the reward, and few processes."""
    if device == "cpu":
        return []
    return [
        f"reward.custom_reward_function.path={REPOSITORY / 'scripts' / 'data' / 'arithmetic_reward.py'}",
        "reward.num_workers=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "++ray_kwargs.ray_init.include_dashboard=False",
        "++ray_kwargs.ray_init.address=local",
        # verl looks for finished responses every two seconds, longer than a step of this model.
        "trainer.v1.sampler.custom_sampler.path=pkg://verl_pg_plugin.rollout.replay_buffer",
        "trainer.v1.sampler.custom_sampler.name=prompt_replay_buffer",
    ]
