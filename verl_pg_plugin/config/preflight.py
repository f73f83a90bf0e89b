"""What is certain to fail is found before a process or a GPU is claimed, and all of it at once; what may fail is a
warning. verl's own words, losses, loggers and files are verl's to look at."""

from __future__ import annotations

import inspect
import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import get_device_name

from verl_pg_plugin.config.checkpoints import checkpoint_issues, read_hf_config
from verl_pg_plugin.config.keys import ACTOR, CRITIC, CRITIC_MODEL, FSDP_STRATEGIES, MODEL, REF, ROLLOUT
from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.config.rules import (
    MACHINE_RULES,
    PREFLIGHT_RULES,
    RULES,
    engine_of,
    roles_of,
    sp_size_of,
    trainer_issues,
)
from verl_pg_plugin.issue import ConfigError, Issue

__all__ = ["check", "preflight", "sharing_issues"]

logger = logging.getLogger(__name__)

N = f"{ROLLOUT}.n"
PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"
NODES, GPUS_PER_NODE = "trainer.nnodes", "trainer.n_gpus_per_node"
RAY_GPUS, RAY_ADDRESS = "ray_kwargs.ray_init.num_gpus", "ray_kwargs.ray_init.address"
COUNTS = (PROMPT, RESPONSE, N, NODES, GPUS_PER_NODE, f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs")
"""Positive integers that every run multiplies or divides by."""
INTERPRETERS = ("py_executable", "pip", "uv", "conda", "container", "image_uri")
"""Keys of a Ray runtime environment that choose the packages of workers."""
PACKAGES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""What a rollout engine of verl's imports."""
FILES = (
    "reward.custom_reward_function.path",
    "data.custom_cls.path",
    f"{ROLLOUT}.multi_turn.function_tool_path",
    f"{ROLLOUT}.multi_turn.tool_config_path",
    f"{ROLLOUT}.multi_turn.interaction_config_path",
)


def check(config: DictConfig) -> None:
    """Pass, and log warnings, or raise one error that lists all that is certain to fail.

    Raises:
        ConfigError: ``preflight`` finds errors.
        omegaconf.errors.OmegaConfBaseException: when an interpolation cannot be resolved.
    """
    found = preflight(config)
    for issue in found:
        if issue.is_warning:
            logger.warning("verl_pg_plugin: %s: %s; %s", issue.setting, issue.why, issue.fix)
    if errors := [issue for issue in found if not issue.is_warning]:
        raise ConfigError(errors)


def preflight(config: DictConfig) -> list[Issue]:
    """All that can be known against a run before Ray starts: errors, then warnings.

    Args:
        config: the composed trainer config, verl's ``ppo_trainer`` or this plugin's ``pg_ppo_trainer``.

    Raises:
        omegaconf.errors.OmegaConfBaseException: when an interpolation cannot be resolved.
    """
    certain = not _joins_cluster(config)
    here = [*_gpus(config), *_rollout_engine(config), *_files(config), *_data(config)]
    found = sharing_issues(config)
    for look in (_counts, _divisors, _budgets):
        said = {issue.key for issue in found}
        found += [issue for issue in look(config) if issue.key not in said]
    found += [issue if certain else replace(issue, is_warning=True) for issue in here]
    found = [issue for issue in dict.fromkeys(found) if not _follows(config, issue, found)]
    if all(issue.is_warning for issue in found):
        found += _verls_objection(config)
    return sorted(found, key=lambda issue: issue.is_warning)


def sharing_issues(config: DictConfig) -> list[Issue]:
    """What the modes say against a run: its trainer's config, its engines and its checkpoints."""
    found = [*trainer_issues(config)]
    checkpoints: dict[str, list[Issue]] = {}
    for role in roles_of(config):
        engine = engine_of(config, role, read_hf_config(config, CRITIC_MODEL if role == CRITIC else MODEL))
        section = engine.model_section
        if section not in checkpoints:
            checkpoints[section] = list(checkpoint_issues(config, section))
            found += checkpoints[section]
        if not (mode_of(config).shares_prefixes and engine.get("strategy") in FSDP_STRATEGIES):
            continue
        if checkpoints[section]:
            engine = replace(engine, hf_config=None)  # an architecture that cannot share is looked at no further
        for rule in (*RULES, *PREFLIGHT_RULES):
            if issue := rule(engine):
                uncertain = rule in MACHINE_RULES and _joins_cluster(config)
                found.append(replace(issue, is_warning=issue.is_warning or uncertain))
    return found


def _follows(config: DictConfig, issue: Issue, found: list[Issue]) -> bool:
    """Whether the setting is an interpolation, and the one that it follows has the same issue."""
    parent, _, leaf = issue.key.rpartition(".")
    section = OmegaConf.select(config, parent) if parent else None
    if not (isinstance(section, DictConfig) and leaf in section and OmegaConf.is_interpolation(section, leaf)):
        return False
    return any(other.why == issue.why and other.key != issue.key for other in found)


def _count(config: DictConfig, key: str) -> int | None:
    """A positive integer; None for all else, of which others speak."""
    value = OmegaConf.select(config, key)
    return value if isinstance(value, int) and value > 0 else None


def _joins_cluster(config: DictConfig) -> bool:
    """Whether the run's processes may be on machines that this one need not be like.

    verl's ``ray.init`` without an address joins a cluster that was started on this machine; workers may have another
    interpreter, which has other packages.
    """
    address = OmegaConf.select(config, RAY_ADDRESS) or os.environ.get("RAY_ADDRESS")
    if any(OmegaConf.select(config, f"ray_kwargs.ray_init.runtime_env.{key}") for key in INTERPRETERS):
        return True
    if address is not None:
        return bool(address != "local")
    return Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster").exists()


# --- Counts, divisors, budgets ---------------------------------------------------------------------------------------


def _limits(config: DictConfig) -> Iterator[tuple[str, str, bool]]:
    """Key of the limit of a micro-batch, its role, and whether it counts tokens; of the roles that the run has."""
    kinds = [(ACTOR, ACTOR, "ppo_", ""), (ROLLOUT, ACTOR, "log_prob_", "log_prob_")]
    kinds += [(REF, REF, "log_prob_", "log_prob_")] if need_reference_policy(config) else []
    for section, role, limit, switch in kinds:
        tokens = bool(OmegaConf.select(config, f"{section}.{switch}use_dynamic_bsz"))
        yield f"{section}.{limit}{'max_token_len' if tokens else 'micro_batch_size'}_per_gpu", role, tokens
    if CRITIC in roles_of(config) and OmegaConf.select(config, "trainer.use_v1"):
        yield f"{CRITIC}.ppo_infer_max_token_len_per_gpu", CRITIC, True  # of the update, too


def _counts(config: DictConfig) -> Iterator[Issue]:
    sizes = [engine_of(config, role).sp_key for role in roles_of(config)]
    for key in (*COUNTS, *(key for key, _, _ in _limits(config)), *sizes):
        value = OmegaConf.select(config, key)
        whole = isinstance(value, (int, float)) and value >= 1 and value == int(value)  # verl takes 16384.0, too
        if value is not None and not whole:
            yield Issue(f"{key}={value}", "is not a positive integer", f"{key}=<positive integer>")
    for section in (MODEL, CRITIC_MODEL):
        rank = OmegaConf.select(config, f"{section}.lora_rank")
        if rank is not None and not (isinstance(rank, int) and rank >= 0):
            key = f"{section}.lora_rank"
            yield Issue(f"{key}={rank}", "is not an integer of at least 0, and 0 is no adapter", f"{key}=0")


def _divisors(config: DictConfig) -> Iterator[Issue]:
    per_node, nodes = _count(config, GPUS_PER_NODE), _count(config, NODES)
    if per_node is None or nodes is None:
        return
    ranks, total = per_node * nodes, f"{per_node * nodes} ranks ({NODES} times {GPUS_PER_NODE})"
    for role in roles_of(config):
        engine = engine_of(config, role)
        if engine.get("strategy") not in FSDP_STRATEGIES:
            continue
        size, key = engine.sp_size, engine.sp_key
        if ranks % size:
            why = f"sequences cannot be spread over {size} of {total}: it does not divide them"
            yield Issue(f"{key}={size}", why, f"{key}={_largest_divisor(ranks, size)}")
        elif role != REF:
            yield from _mini_batch(config, role, ranks // size)
    tensor, others = f"{ROLLOUT}.tensor_model_parallel_size", ("data", "pipeline_model")
    server = _count(config, tensor) or 1
    for name in others:
        server *= _count(config, f"{ROLLOUT}.{name}_parallel_size") or 1
    if OmegaConf.select(config, "actor_rollout_ref.hybrid_engine") is not False and ranks % server:
        why = f"a server of the rollout takes {server} GPUs, which does not divide {total}"
        fix = f"{tensor}={_largest_divisor(ranks, server)} {' '.join(f'{ROLLOUT}.{x}_parallel_size=1' for x in others)}"
        yield Issue(f"{tensor}={_count(config, tensor) or 1}", why, fix)


def _mini_batch(config: DictConfig, role: str, data_ranks: int) -> Iterator[Issue]:
    """verl's workers assert that a mini-batch divides into their data-parallel ranks, after the first rollouts."""
    key = f"{role}.ppo_mini_batch_size"
    prompts, n = _count(config, key), _count(config, N)
    if prompts is None or n is None or not prompts * n % data_ranks:
        return
    fitting = next(size for size in range(prompts, prompts + data_ranks + 1) if size * n % data_ranks == 0)
    more = next(size for size in range(n, n + data_ranks + 1) if prompts * size % data_ranks == 0)
    why = f"a mini-batch of {prompts} prompts x {N}={n} sequences does not divide into {data_ranks} data-parallel ranks"
    yield Issue(f"{key}={prompts}", why, f"{key}={fitting}, or {N}={more}")


def _budgets(config: DictConfig) -> Iterator[Issue]:
    prompt, response = _count(config, PROMPT), _count(config, RESPONSE)
    if prompt is None or response is None:
        return
    longest = min(prompt + response, _count(config, f"{ROLLOUT}.max_model_len") or prompt + response)
    for key, role, tokens in _limits(config):
        budget, ranks = _count(config, key), sp_size_of(config, role)
        # The last token of a sequence is not computed in packed mode: nothing is predicted from it.
        if not tokens or budget is None or budget * ranks >= longest - 1:
            continue
        why = f"holds {budget * ranks} tokens, and a sequence may have {longest}: one that has more ends the run"
        why += f"; {ranks} GPUs share one" if ranks > 1 else ""
        yield Issue(f"{key}={budget}", why, f"{key}={-(-longest // ranks)}", is_warning=True)


def _largest_divisor(number: int, at_most: int) -> int:
    return max(size for size in range(1, min(number, at_most) + 1) if number % size == 0)


# --- This machine ----------------------------------------------------------------------------------------------------


def _gpus(config: DictConfig) -> Iterator[Issue]:
    """GPUs that a run on this machine alone asks for."""
    per_node, told, device = _count(config, GPUS_PER_NODE), OmegaConf.select(config, RAY_GPUS), get_device_name()
    if per_node is None or OmegaConf.select(config, NODES) != 1 or device not in ("cuda", "cpu"):
        return
    if not (told is None or isinstance(told, (int, float))):
        return
    wanted = per_node
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    if OmegaConf.select(config, "trainer.use_v1") and mode.endswith("separate_async"):
        wanted += (_count(config, f"{ROLLOUT}.nnodes") or 0) * (_count(config, f"{ROLLOUT}.n_gpus_per_node") or 0)
    if device == "cpu":  # a "GPU" of Ray's is a worker process there
        there = int(told or 0)
        why = f"{wanted} worker processes are asked for and Ray is told of {there}: on the CPU a GPU of Ray's is one"
        setting, fix = f"{GPUS_PER_NODE}={per_node}, {RAY_GPUS}={told}", f"++{RAY_GPUS}={wanted}"
    else:
        there = torch.cuda.device_count() if told is None else int(told)  # asks the driver, and starts no CUDA context
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"{wanted} GPUs are asked for, and {there} are there"
        why += f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        setting, fix = f"{GPUS_PER_NODE}={per_node}", f"{GPUS_PER_NODE}={there - (wanted - per_node)}"
        if there <= wanted - per_node:
            fix = "run where nvidia-smi lists enough, with a torch for CUDA; or export VERL_PLATFORM=cpu for a trial"
    if wanted > there:
        yield Issue(setting, why, fix)


def _rollout_engine(config: DictConfig) -> Iterator[Issue]:
    key = f"{ROLLOUT}.name"
    package = PACKAGES.get(str(OmegaConf.select(config, key)))
    try:
        if package:
            version(package)
    except PackageNotFoundError:
        fix = f"pip install 'verl[{OmegaConf.select(config, key)}]', or {key}=<an engine you have>"
        yield Issue(f"{key}={OmegaConf.select(config, key)}", f"{package} is not installed in {sys.prefix}", fix)


def _files(config: DictConfig) -> Iterator[Issue]:
    for key in FILES:
        path = OmegaConf.select(config, key)
        if isinstance(path, str) and "://" not in path and not Path(path).exists():
            yield Issue(f"{key}={path}", "no such file", f"{key}=<file>")


def _data(config: DictConfig) -> Iterator[Issue]:
    """Files that are not there, and the column of prompts; data sets of a class of the user's own are that class's."""
    if OmegaConf.select(config, "data.custom_cls.path"):
        return
    prompt = str(OmegaConf.select(config, "data.prompt_key"))
    seen: set[str] = set()
    for key in ("data.train_files", "data.val_files"):
        value: Any = OmegaConf.select(config, key)
        for path in map(str, value if isinstance(value, (list, ListConfig)) else [value] if value else []):
            if "://" in path or any(sign in path for sign in "*?["):
                continue  # on another machine, or a pattern, which ``datasets`` expands
            if not Path(path).is_file():
                there = path.startswith("~") and Path(path).expanduser().is_file()
                why = "does not exist" + (": verl does not expand ~" if there else "")
                yield Issue(f"{key}={path}", why, f"{key}={Path(path).expanduser() if there else '<file>.parquet'}")
            elif path.endswith(".parquet") and path not in seen:
                seen.add(path)
                yield from _columns(key, path, prompt)


def _columns(key: str, path: str, prompt: str) -> Iterator[Issue]:
    try:
        names = pq.read_schema(path).names
    except (pa.ArrowException, OSError) as error:
        why = f"cannot be read as parquet: {str(error).partition(chr(10))[0]}"
        yield Issue(f"{key}={path}", why, f"{key}=<file>.parquet")
        return
    if prompt not in names:
        likely = next((name for name in ("prompt", "messages") if name in names), "<column of the messages>")
        why = f"{path} has no column {prompt!r}; it has {', '.join(names)}"
        yield Issue(f"data.prompt_key={prompt}, {key}={path}", why, f"data.prompt_key={likely}")
    for name, what in (("data_source", "picks the reward function"), ("reward_model", "holds the ground_truth")):
        if name not in names:
            why = f"{path} has no column {name!r}, which {what} for verl's own reward managers"
            yield Issue(f"{key}={path}", why, "add the column if one of them scores", is_warning=True)


# --- verl's own ------------------------------------------------------------------------------------------------------


def _verls_objection(config: DictConfig) -> Iterator[Issue]:
    """The error that verl's validation of this config ends with, if it does."""
    validate = inspect.unwrap(validate_config)  # without the hook through which verl's entry point asks us
    errors = (ValueError, AssertionError, InstantiationException, OmegaConfBaseException, TypeError, ArithmeticError)
    try:
        with redirect_stdout(io.StringIO()):  # it says that all is well
            validate(
                config=config,
                use_reference_policy=need_reference_policy(config),
                use_critic=CRITIC in roles_of(config),
            )
    except errors as error:
        why = f"verl's own validation refuses it: {type(error).__name__}: {' '.join(str(error).split())}"
        yield Issue("", why, "change what it names")
    except ImportError:
        pass  # of a package that the rollout needs, which has been said where it is certain
