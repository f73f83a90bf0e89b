"""Where the lengths of an estimate come from: numbers, a data set, or the rollouts of a run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from verl_pg_plugin.architectures import architecture_issues
from verl_pg_plugin.cli.command import CommandError
from verl_pg_plugin.cli.estimate import rollouts
from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.cost.forecast import Batch

__all__ = ["Model", "load_model", "load_tokenizer", "read_batch"]


@dataclass(frozen=True)
class Model:
    """A checkpoint's config and its price."""

    config: PretrainedConfig
    flops: ModelFlops


def load_model(name: str) -> Model:
    """Read a config; no weight is read.

    Raises:
        CommandError: there is none, or packed mode cannot run such a model.
    """
    try:
        config = AutoConfig.from_pretrained(_folder(name))
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"--model {name}: {str(error).strip().splitlines()[0]}") from error
    reasons = architecture_issues(config, trust_remote_code=False)
    if reasons:
        raise CommandError(f"--model {name}: packed mode does not run it: {reasons[0].why}")
    return Model(config, ModelFlops.of_config(config))


def read_batch(args: argparse.Namespace) -> tuple[Batch, str]:
    """The mini-batch, and what must be known about its lengths.

    Raises:
        CommandError: what is needed is missing or cannot be read.
    """
    if args.rollouts is None and args.response is None:
        raise CommandError("--response is missing: how long responses are cannot be told from prompts")
    if args.prompt is not None:
        responses = [[args.response] * args.n] * args.groups
        return Batch.of_lengths([args.prompt] * args.groups, responses), "every group alike; prompts share nothing"
    if args.data is not None:
        return _of_data(args, load_tokenizer(args.model))
    return rollouts.read_batch(args.rollouts, args.groups, lambda: load_tokenizer(args.model))


def _folder(name: str) -> str:
    """A folder as it is; of a hub id the one in the cache."""
    if Path(name).is_dir():
        return name
    try:
        return snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise CommandError(
            f"--model {name} is neither a folder nor in the cache of huggingface_hub; huggingface-cli download {name} "
            "--include '*.json' brings all that is needed"
        ) from error


def load_tokenizer(name: str) -> Any:
    """A checkpoint's tokenizer.

    Raises:
        CommandError: it has none.
    """
    try:
        return AutoTokenizer.from_pretrained(_folder(name))
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"--model {name} has no tokenizer: {str(error).strip().splitlines()[0]}") from error


def _of_data(args: argparse.Namespace, tokenizer: Any) -> tuple[Batch, str]:
    """The first prompts of a data set, as verl's data set and its agent loop write them."""
    try:
        names = pq.read_schema(args.data).names
        if args.prompt_key not in names:
            raise CommandError(f"--data {args.data} has no column {args.prompt_key}; it has {', '.join(names)}")
        column = pq.read_table(args.data, columns=[args.prompt_key]).column(0)[: args.groups].to_pylist()
    except FileNotFoundError as error:
        raise CommandError(f"--data {args.data}: no such file") from error
    except (OSError, pa.ArrowException) as error:
        raise CommandError(f"--data {args.data}: {str(error).splitlines()[0]}") from error
    if not column:
        raise CommandError(f"--data {args.data} has no row")
    texts = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) for prompt in column]
    prompts = [rollouts.token_ids(tokenizer, text) for text in texts]
    batch = Batch.of_prompts(prompts, [[args.response] * args.n] * len(prompts))
    lengths = [len(prompt) for prompt in prompts]
    return batch, (
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, in the order of the file; responses of "
        f"{args.response} tokens each"
    )
