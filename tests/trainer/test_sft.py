"""verl's SFT trainer with the plugin's engine config: losses and gradient norms equal stock verl's."""

import os
import random
from typing import Any
from unittest import TestCase
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from make_tiny_checkpoint import make_tiny_checkpoint
from transformers import AutoTokenizer
from verl.trainer import sft_trainer

from tests.config.config_support import compose_config
from tests.engine.ranks import on_ranks, weights_stay_on_the_cpu
from verl_pg_plugin import register
from verl_pg_plugin.trainer.sft_blocks import SFTBlocks

SHARED = "engine._target_=verl_pg_plugin.config.PrefixGrouperEngineConfig +engine.use_prefix_grouper=True"
FLOAT32 = "+engine.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
BLOCKS = [
    "data.custom_cls.path=pkg://verl_pg_plugin.trainer.sft_blocks",
    "data.custom_cls.name=SFTBlocks",
    "+data.samples_per_block=2",
    "data.train_batch_size=4",
]
CASES = {
    "fsdp2": ["engine.strategy=fsdp2"],
    "fsdp1": ["engine.strategy=fsdp"],
    "ulysses": ["engine.strategy=fsdp2", "engine.ulysses_sequence_parallel_size=2"],
    "lora": ["engine.strategy=fsdp2", "model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=all-linear"],
    "blocks": ["engine.strategy=fsdp2", *BLOCKS],
}
STOCK = {"fsdp1": "fsdp2", "ulysses": "fsdp2"}  # stock verl's loss under Ulysses differs on a CPU


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny checkpoint with a chat template, and conversations with one system prompt, two for each question."""
    folder = tmp_path_factory.mktemp("sft")
    checkpoint = make_tiny_checkpoint(folder / "model", warm_up_steps=0)
    system = {"role": "system", "content": "Answer with a number and nothing else, however long the question is."}
    draw, conversations = random.Random(0), []
    for question in [*range(12)] * 2:
        user = {"role": "user", "content": f"{question}+{question}="}
        conversations.append([system, user, {"role": "assistant", "content": str(draw.randrange(10**5))}])
    draw.shuffle(conversations)
    pq.write_table(pa.table({"messages": conversations}), folder / "train.parquet")
    return str(checkpoint), str(folder / "train.parquet")


Runs = dict[str, list[dict[str, float]]]


def train(rank: int, checkpoint: str, file: str, folder: str) -> Runs:
    """Metrics of three steps of every case, in stock verl and with shared prefixes."""
    register()
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment = patch.dict(os.environ, {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    logged: list[dict[str, float]] = []

    class Tracking:
        def __init__(self, **kwargs: Any) -> None: ...

        def log(self, data: dict[str, float], step: int) -> None:
            ratios = [record.args[0] for record in log.records if "dedup ratio" in record.msg]
            logged.append({**data, "dedup ratio": ratios[-1] if ratios else 1.0})

    tracked = patch.object(sft_trainer, "Tracking", Tracking)
    runs = {}
    with weights_stay_on_the_cpu(), environment, tracked, TestCase().assertLogs("verl_pg_plugin", "INFO") as log:
        for case, overrides in CASES.items():
            for shared in (False, True) if case not in STOCK else (True,):
                logged.clear()
                log.records.clear()
                torch.manual_seed(0)  # verl draws the adapter's weights
                config = compose_config(
                    *(f"model.path={checkpoint}", f"data.train_files={file}", "data.train_batch_size=8"),
                    *("data.num_workers=0", "data.max_token_len_per_gpu=512", "trainer.device=cpu"),
                    *("trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.resume_mode=disable"),
                    *("model.use_remove_padding=True", "+model.override_config.attn_implementation=sdpa"),
                    *("engine.use_torch_compile=False", FLOAT32, f"trainer.default_local_dir={folder}/{case}{shared}"),
                    *("optim.lr=1e-3", *overrides, *(SHARED.split() if shared else [])),
                    module="verl.trainer.config",
                    name="sft_trainer_engine",
                )
                sft_trainer.SFTTrainer(config).fit()
                runs[f"{case} {'shared' if shared else 'stock'}"] = [dict(step) for step in logged]
    return runs


@pytest.fixture(scope="module")
def runs(prepared: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return on_ranks(2, train, *prepared, str(tmp_path_factory.mktemp("checkpoints")))[0]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradient_norms_match_stock_verl(runs: Runs, case: str) -> None:
    stock, shared = runs[f"{STOCK.get(case, case)} stock"], runs[f"{case} shared"]
    assert len(stock) == len(shared) == 3
    for expected, got in zip(stock, shared, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert got[name] == pytest.approx(expected[name], rel=1e-5), name
        assert all(isinstance(value, int | float) for value in got.values()), "TensorBoard accepts numbers only"


def test_blocks_keep_answers_to_one_question_together(runs: Runs) -> None:
    shuffled, blocks = runs["fsdp2 shared"], runs["blocks shared"]
    tokens = [sum(step["train/global_tokens"] for step in steps) for steps in (shuffled, blocks)]
    assert tokens[0] == tokens[1], "an epoch has every sample once"
    assert min(step["dedup ratio"] for step in blocks) > 1.1 * max(step["dedup ratio"] for step in shuffled)


def test_samples_that_fill_no_block_are_dropped_with_a_warning(prepared: tuple[str, str], caplog) -> None:
    checkpoint, file = prepared
    config = compose_config("+data.samples_per_block=5", module="verl.trainer.config", name="sft_trainer_engine").data
    assert len(SFTBlocks(parquet_files=file, tokenizer=AutoTokenizer.from_pretrained(checkpoint), config=config)) == 4
    assert "4 samples fill no block of 5" in caplog.text
