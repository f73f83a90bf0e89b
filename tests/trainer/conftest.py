"""The config of a shared-prefix run, on a checkpoint without weights."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from transformers import Qwen3Config


class Workers:
    """A worker group of four processes that are two data-parallel ranks."""

    def __init__(self) -> None:
        self._dispatch_info: dict[str, list[int]] = {}
        self.updated: list[Any] = []

    def _query_dispatch_info(self, role: str) -> list[int]:
        assert role == "actor"
        return [0, 0, 1, 1]


@pytest.fixture
def config(tmp_path: Path) -> DictConfig:
    """Settings that a trainer's balance reads: mini-batches of two prompts with two responses each."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    Qwen3Config(vocab_size=64, **sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    model = {"_target_": "verl.workers.config.HFModelConfig", "path": str(tmp_path), "tokenizer_path": "/nowhere"}
    roles = {
        "model": {**model, "use_remove_padding": True},
        "actor": {"ppo_mini_batch_size": 2, "use_prefix_grouper": True},
        "rollout": {"n": 2},
    }
    return OmegaConf.create({"actor_rollout_ref": roles})
