"""Composed configs and tiny checkpoints that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from verl_pg_plugin.config import Mode

TINY = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FLAGS = {
    Mode.PADDED: (False, False),
    Mode.RMPAD: (False, True),
    Mode.PADDED_GROUPS: (True, False),
    Mode.PACKED: (True, True),
}


def compose_config(*overrides: str) -> DictConfig:
    """``pg_ppo_trainer`` with command-line overrides."""
    with initialize_config_module("verl_pg_plugin.config.hydra", version_base=None):
        return compose("pg_ppo_trainer", overrides=list(overrides))


def save_tokenizer(folder: Path) -> None:
    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def save_checkpoint(folder: Path, hf_config: PretrainedConfig | None = None) -> Path:
    """Config and tokenizer of a tiny model; the validators never look at weights."""
    hf_config = hf_config or Qwen3Config(**TINY)
    hf_config.architectures = [type(hf_config).__name__.replace("Config", "ForCausalLM")]
    hf_config.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
