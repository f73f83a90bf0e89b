"""Does verl's filter of long prompts leave enough of them for one step?

Prompts are read in the order of the file and measured as verl measures them, until one step is full: a fraction of a
second where most prompts fit, and never more than ``DEADLINE_S``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.parquet as pq
from jinja2 import TemplateError
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer

from verl_pg_plugin.config.before_ray.data import BATCH, CUSTOM_DATASET, FILES, PROMPT_KEY, local_files
from verl_pg_plugin.config.before_ray.reading import count, wrong
from verl_pg_plugin.config.checkpoint_checks import local_checkpoint, optional_folder
from verl_pg_plugin.config.keys import MODEL
from verl_pg_plugin.config.violation import Violation

__all__ = ["prompt_violations"]

DEADLINE_S = 10.0
FILTER, LONGEST = "data.filter_overlong_prompts", "data.max_prompt_length"
TEMPLATE = f"{MODEL}.custom_chat_template"
MEDIA = ("data.image_key", "data.video_key", "data.audio_key")


def prompt_violations(config: DictConfig) -> Iterator[Violation]:
    """The filter leaves fewer prompts than a step takes, of training files, or none, of validation files.

    Looked at where tokenizer and files are on this machine and prompts are text. What a prompt raises verl takes for a
    long one, so a chat template that is missing or does not fit leaves nothing either.
    """
    longest, batch = count(config, LONGEST), count(config, BATCH)
    if OmegaConf.select(config, FILTER) is not True or longest is None or batch is None:
        return
    if OmegaConf.select(config, CUSTOM_DATASET) or OmegaConf.select(config, "data.tool_config_path"):
        return
    length = _length(config)
    if length is None:
        return
    deadline = time.monotonic() + DEADLINE_S
    for key, limit in FILES.items():
        wanted = batch if key == "data.train_files" else 1
        if (found := _measure(config, key, count(config, limit), length, longest, wanted, deadline)) is None:
            continue
        fitting, seen, shortest, error = found
        if fitting >= wanted or not seen:
            continue
        if error and shortest is None:
            why = f"the chat template of the tokenizer cannot be applied to the prompts: {error}"
            yield wrong(config, "prompt_filter", key, why, f"{TEMPLATE}=<template>, or a tokenizer that has one")
            return
        left = f"leaves {fitting or 'none'} of {seen} prompts"
        need = f", and a step takes {wanted}" if wanted > 1 else ""
        why = f"{FILTER}=True {left}{need}; the shortest has {shortest} tokens"
        fix = f"{LONGEST}=<tokens of the longest prompt to keep>" + (f", or {BATCH}={fitting}" if fitting else "")
        yield wrong(config, "prompt_filter", (LONGEST, key), why, fix)
        return  # the same limit filters both


def _length(config: DictConfig) -> Callable[[Any], int] | None:
    """Tokens of a prompt as verl's data set counts them, None where no tokenizer is at hand."""
    path = str(OmegaConf.select(config, f"{MODEL}.path"))
    _, source = optional_folder(config, MODEL, "tokenizer_path", path)
    folder = local_checkpoint(source)
    if folder is None:
        return None
    try:
        trusted = OmegaConf.select(config, f"{MODEL}.trust_remote_code") is True
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except (ValueError, OSError, KeyError):
        return None  # an unreadable tokenizer is the checkpoint's problem
    if template := OmegaConf.select(config, TEMPLATE):
        tokenizer.chat_template = template
    asked: Any = OmegaConf.to_container(config.data.apply_chat_template_kwargs, resolve=True)
    options = {name: value for name, value in asked.items() if name not in ("tokenize", "return_dict")}

    def length(messages: Any) -> int:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return length


Measured = tuple[int, int, int | None, str]
"""Prompts that fit, prompts that were looked at, tokens of the shortest, and the first error."""


def _measure(
    config: DictConfig,
    key: str,
    limit: int | None,
    length: Callable[[Any], int],
    longest: int,
    wanted: int,
    deadline: float,
) -> Measured | None:
    """None where the files do not tell, or the time is over before the answer is sure."""
    files = local_files(config, key)
    column = str(OmegaConf.select(config, PROMPT_KEY))
    media = {str(OmegaConf.select(config, name)) for name in MEDIA}
    if not files or any(
        file.schema is None or column not in file.schema.names or media & set(file.schema.names) for file in files
    ):
        return None
    if limit is not None and OmegaConf.select(config, "data.shuffle"):
        return None  # a random selection
    fitting = seen = 0
    shortest, error = None, ""
    for messages in _prompts([file.path for file in files], column):
        if fitting >= wanted or seen == limit:
            break
        if time.monotonic() > deadline:
            return None
        seen += 1
        try:
            tokens = length(messages)
        except (TemplateError, ValueError, TypeError, KeyError) as raised:
            error = error or f"{type(raised).__name__}: {next(iter(str(raised).splitlines()), 'without a message')}"
            continue
        shortest = tokens if shortest is None else min(shortest, tokens)
        fitting += tokens <= longest
    return fitting, seen, shortest, error


def _prompts(paths: list[str], column: str) -> Iterator[Any]:
    for path in paths:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=256, columns=[column]):
            yield from batch.column(0).to_pylist()
