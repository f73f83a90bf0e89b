"""Overrides on a checkpoint that exists, to break one at a time."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.doctor.support import ACTOR, ROLLOUT
from tests.support import save_tiny_model


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Complete but for the tokenizer's content, which no validator reads."""
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(path)
    (path / "tokenizer.json").write_text("{}")
    return str(path)


@pytest.fixture(scope="package")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As many prompts as a step takes, with the columns that verl reads."""
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    row = {"prompt": [{"role": "user", "content": "2+2"}], "data_source": "sum", "reward_model": {"ground_truth": "4"}}
    pq.write_table(pa.Table.from_pylist([row] * 8), path)
    return str(path)


@pytest.fixture
def packed(checkpoint: str, data_file: str) -> list[str]:
    """Overrides that leave nothing to object to."""
    return [
        f"data.train_files={data_file}",
        f"data.val_files={data_file}",
        "data.train_batch_size=8",
        "trainer.n_gpus_per_node=4",
        "trainer.logger=console",
        "+ray_kwargs.ray_init.num_gpus=4",
        "+ray_kwargs.ray_init.address=local",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"actor_rollout_ref.model.path={checkpoint}",
        "actor_rollout_ref.model.use_remove_padding=True",
        f"{ACTOR}.use_prefix_grouper=True",
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.name=hf",
        "algorithm.adv_estimator=grpo",
        "data.max_prompt_length=1024",
        "data.max_response_length=256",
        "trainer.device=cpu",
    ]
