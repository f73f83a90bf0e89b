"""Composed configs and tiny checkpoints for the tests of this folder."""

import functools
import pickle
from pathlib import Path
from typing import Any

import omegaconf.base
import yaml
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from tests.support import TINY
from verl_pg_plugin.config import Mode

# OmegaConf parses the text of an interpolation each time it reads it: a third of these tests' time.
omegaconf.base.parse = functools.cache(omegaconf.base.parse)  # type: ignore[attr-defined]
yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc] # OmegaConf's loader derives from it; Python's own is slow
# use_prefix_grouper and use_remove_padding
FLAGS = {
    Mode.PADDED: (False, False),
    Mode.RMPAD: (False, True),
    Mode.PADDED_GROUPS: (True, False),
    Mode.PACKED: (True, True),
}


@functools.cache
def _composed(module: str, name: str, groups: tuple[str, ...]) -> bytes:
    """Pickled: OmegaConf's own copy takes six times as long."""
    with initialize_config_module(module, version_base=None):
        return pickle.dumps(compose(name, overrides=list(groups)))


def compose_config(
    *overrides: str, module: str = "verl_pg_plugin.config.hydra", name: str = "pg_ppo_trainer"
) -> DictConfig:
    """A config with command-line overrides: composed once for each choice of groups, and the rest applied by Hydra."""
    groups = tuple(item for item in overrides if "." not in item.partition("=")[0] or item.startswith("hydra."))
    config = pickle.loads(_composed(module, name, groups))  # noqa: S301
    parsed = OverridesParser.create().parse_overrides([item for item in overrides if item not in groups])
    ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    return config


def compose_stock(*overrides: str) -> DictConfig:
    return compose_config(*overrides, module="verl.trainer.config", name="ppo_trainer")


def save_tokenizer(folder: Path, preamble: str = "") -> None:
    """Save a tokenizer of the words a to d; its chat template writes the preamble before each message."""
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4, "d": 5}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = f"{{% for message in messages %}}{preamble}{{{{ message.content }}}} {{% endfor %}}"
    fast.save_pretrained(folder)


def save_checkpoint(folder: Path, hf_config: PretrainedConfig | None = None) -> Path:
    """Save config and tokenizer of a tiny model; the validators do not read weights."""
    hf_config = hf_config or Qwen3Config(**TINY)
    hf_config.architectures = [type(hf_config).__name__.replace("Config", "ForCausalLM")]
    hf_config.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def runnable(checkpoint: Path) -> list[str]:
    """Overrides without a problem in packed mode, with a reference policy."""
    return [
        "trainer.n_gpus_per_node=1",
        "trainer.logger=console",
        "+ray_kwargs.ray_init.address=local",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"actor_rollout_ref.model.path={checkpoint}",
        "actor_rollout_ref.actor.use_kl_loss=True",
        *(f"actor_rollout_ref.{of}_micro_batch_size_per_gpu=8" for of in ("actor.ppo", "ref.log_prob")),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=4"),
        *("algorithm.adv_estimator=grpo", "trainer.balance_batch=False"),
        *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    ]


def parse(overrides: str) -> dict[str, Any]:
    parsed = OverridesParser.create().parse_overrides(overrides.split())
    return {override.key_or_group: override.value() for override in parsed}


SECTIONS = ("model", "actor", "rollout", "ref")
VERL_EXAMPLES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "verl_examples.yaml").read_text())


def example_settings(overrides: str) -> dict[str, Any]:
    """Settings by full keys: the file leaves out ``actor_rollout_ref``."""
    parsed = parse(overrides).items()
    return {f"actor_rollout_ref.{key}" if key.split(".")[0] in SECTIONS else key: value for key, value in parsed}


SHARED = example_settings(VERL_EXAMPLES["shared"])  # by verl's examples for FSDP
CRITIC = (
    "algorithm.adv_estimator=gae critic.model.path={checkpoint} critic.ppo_micro_batch_size_per_gpu=8 "
    "critic.model.use_remove_padding=True critic.optim.lr=1e-5 "
)
