"""Are the data files there, readable, with the columns that verl reads, and enough rows for one step?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.before_ray.reading import count, is_remote, words, wrong
from verl_pg_plugin.config.keys import ROLLOUT
from verl_pg_plugin.config.violation import Violation

__all__ = ["DataFile", "data_violations", "local_files"]

FILES = {"data.train_files": "data.train_max_samples", "data.val_files": "data.val_max_samples"}
"""Key of the files, and of the number of rows that are taken of them."""
BATCH = "data.train_batch_size"
PROMPT_KEY = "data.prompt_key"
CUSTOM_DATASET = "data.custom_cls.path"
SUFFIXES = (".parquet", ".json", ".jsonl")


@dataclass(frozen=True)
class DataFile:
    """A file that could be opened.

    Attributes:
        path: on this machine.
        schema: columns and their types; None for json, which has none before it is read.
        num_rows: None where only reading tells.
    """

    path: str
    schema: pa.Schema | None
    num_rows: int | None


def data_violations(config: DictConfig) -> list[Violation]:
    """Problems of the files on this machine; files elsewhere, and data sets of the user's own class, are verl's."""
    if OmegaConf.select(config, CUSTOM_DATASET):
        return []
    found: dict[tuple[str, str], Violation] = {}
    for violation in _of_files(config):
        cause = (violation.why, violation.rule if violation.rule == "data_column" else violation.settings[0].key)
        same = found.get(cause, violation)  # columns of a file that is trained on and validated with
        settings = tuple({setting.key: setting for setting in (*same.settings, *violation.settings)}.values())
        found[cause] = replace(same, settings=settings)
    return list(found.values())


def _of_files(config: DictConfig) -> Iterator[Violation]:
    for key, limit in FILES.items():
        files = []
        for path in words(config, key):
            if _is_elsewhere(path):
                continue
            opened = _open(path)
            if isinstance(opened, DataFile):
                files.append(opened)
                yield from _columns(config, key, opened)
            else:
                why, fix = opened
                name = f"{path} " if len(words(config, key)) > 1 else ""
                yield wrong(config, "data_file", key, name + why, f"{key}={fix}")
        if not words(config, key):
            yield wrong(config, "data_file", key, "names no file", f"{key}=<file>.parquet")
        if len(files) == len(words(config, key)):
            yield from _too_few_rows(config, key, limit, files)


def local_files(config: DictConfig, key: str) -> list[DataFile] | None:
    """The files of a key, None if one of them is elsewhere or cannot be read."""
    opened = [None if _is_elsewhere(path) else _open(path) for path in words(config, key)]
    files = [file for file in opened if isinstance(file, DataFile)]
    return files if len(files) == len(opened) else None


def _is_elsewhere(path: str) -> bool:
    """On another machine, or a pattern, which ``datasets`` expands."""
    return is_remote(path) or (any(sign in path for sign in "*?[") and not Path(path).exists())


def _open(path: str) -> DataFile | tuple[str, str]:
    """The file, or why verl cannot read it and what to write instead."""
    if not Path(path).is_file():
        expanded = Path(path).expanduser()
        if path.startswith("~") and expanded.is_file():
            return "does not exist: verl does not expand ~", str(expanded)
        return ("is a folder" if Path(path).is_dir() else "does not exist"), "<file>.parquet"
    if not path.endswith(SUFFIXES):
        return f"is of no kind that verl reads: {', '.join(SUFFIXES)}", "<file>.parquet"
    if not path.endswith(".parquet"):
        return DataFile(path, None, None)
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        return f"cannot be read as parquet: {str(error).splitlines()[0]}", "<file>.parquet"
    return DataFile(path, metadata.schema.to_arrow_schema(), metadata.num_rows)


def _columns(config: DictConfig, key: str, file: DataFile) -> Iterator[Violation]:
    prompt = str(OmegaConf.select(config, PROMPT_KEY))
    names = file.schema.names if file.schema is not None else _names_of_json(file.path)
    if names is None:
        return
    there = f"{file.path} has no column {{}}; it has {', '.join(names)}"
    if prompt not in names:
        likely = next((name for name in ("prompt", "messages") if name in names), "<column of the messages>")
        yield wrong(config, "data_column", (PROMPT_KEY, key), there.format(repr(prompt)), f"{PROMPT_KEY}={likely}")
    elif file.schema is not None and not pa.types.is_nested(found := file.schema.field(prompt).type):
        why = f"column {prompt!r} of {file.path} holds {found}; verl reads a list of messages with role and content"
        fix = f"write [{{'role': 'user', 'content': <the prompt>}}] into column {prompt!r}"
        yield wrong(config, "data_column", (key, PROMPT_KEY), why, fix)
    if not _scored_from_columns(config):
        return
    for name, what in (("data_source", "picks the reward function"), ("reward_model", "holds the ground_truth")):
        if name not in names:
            fix = f"add the column, which {what}, or name a reward manager of your own (source=importlib)"
            yield wrong(config, "data_column", key, there.format(repr(name)), fix)
    if file.schema is not None and "reward_model" in names:
        kind = file.schema.field("reward_model").type
        fields = [kind.field(index).name for index in range(kind.num_fields)] if pa.types.is_struct(kind) else []
        if "ground_truth" not in fields:
            why = f"column 'reward_model' of {file.path} has no field 'ground_truth', which verl hands to the reward"
            yield wrong(config, "data_column", key, why, "write {'ground_truth': <answer>} into column 'reward_model'")


def _names_of_json(path: str) -> list[str] | None:
    """Keys of the first record of JSON lines; None where the file is not that."""
    with open(path, encoding="utf-8") as file:
        first = next((line for line in file if line.strip()), "")
    try:
        record = json.loads(first)
    except json.JSONDecodeError:
        return None
    return list(record) if isinstance(record, dict) else None


def _scored_from_columns(config: DictConfig) -> bool:
    """Whether a reward manager of verl's reads the reference answers.

    Each of them does, but neither a reward model without a function beside it nor an agent loop that scores.
    """
    by_model = OmegaConf.select(config, "reward.reward_model.enable")
    by_function = OmegaConf.select(config, "reward.custom_reward_function.path") is not None
    by_loop = OmegaConf.select(config, f"{ROLLOUT}.agent.agent_loop_config_path") is not None
    if (by_model and not by_function) or by_loop:
        return False
    return OmegaConf.select(config, "reward.reward_manager.source") == "register"


def _too_few_rows(config: DictConfig, key: str, limit: str, files: list[DataFile]) -> Iterator[Violation]:
    counts = [file.num_rows for file in files]
    if not counts or None in counts:
        return
    rows = sum(number for number in counts if number is not None)
    taken = min(rows, count(config, limit) or rows)
    if taken == 0:
        yield wrong(config, "data_rows", key, "has no row", f"{key}=<file>.parquet")
    batch = count(config, BATCH)
    if key == "data.train_files" and batch is not None and 0 < taken < batch:
        keys = (BATCH, key, limit) if taken < rows else (BATCH, key)
        why = f"a step takes {batch} prompts, and there are {taken}"
        yield wrong(config, "data_rows", keys, why, f"{BATCH}={taken}")
