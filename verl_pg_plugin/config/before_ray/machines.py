"""Do the GPUs suffice, and do the sizes that share them divide each other?"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.device import get_device_name

from verl_pg_plugin.config.before_ray.reading import count, wrong
from verl_pg_plugin.config.checkpoint_checks import roles_of
from verl_pg_plugin.config.facts import Facts
from verl_pg_plugin.config.keys import ACTOR, ROLLOUT
from verl_pg_plugin.config.violation import Violation

__all__ = ["machine_violations", "runs_elsewhere"]

GPUS_PER_NODE = "trainer.n_gpus_per_node"
NODES = "trainer.nnodes"
RAY_GPUS = "ray_kwargs.ray_init.num_gpus"
RAY_ADDRESS = "ray_kwargs.ray_init.address"
MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
SEPARATE = "trainer.v1.separate_async"
HYBRID_ENGINE = "actor_rollout_ref.hybrid_engine"
TRAINER_MODE = "trainer.v1.trainer_mode"


def machine_violations(config: DictConfig) -> Iterator[Violation]:
    """GPUs of a run on this machine alone, and sizes that must divide the number of ranks."""
    per_node, nodes = count(config, GPUS_PER_NODE), count(config, NODES)
    if per_node is None or nodes is None:
        return
    if nodes == 1 and not joins_cluster(config):
        yield from _gpus(config, per_node)
    yield from _divisors(config, per_node * nodes)
    if _is_separate(config):
        yield from _separate(config)


def joins_cluster(config: DictConfig) -> bool:
    """Whether Ray will join a cluster, whose GPUs nobody knows before: verl's ``ray.init`` without an address does so
    where one was started on this machine.
    """
    address = OmegaConf.select(config, RAY_ADDRESS) or os.environ.get("RAY_ADDRESS")
    if address is not None:
        return address != "local"
    return Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster").exists()


def runs_elsewhere(config: DictConfig) -> bool:
    """Whether the run's processes are on machines that the starting one need not be like."""
    address = OmegaConf.select(config, RAY_ADDRESS) or os.environ.get("RAY_ADDRESS")
    return address not in (None, "local", "auto")


def _gpus(config: DictConfig, per_node: int) -> Iterator[Violation]:
    device, told = get_device_name(), OmegaConf.select(config, RAY_GPUS)
    if device not in ("cuda", "cpu") or not (told is None or isinstance(told, (int, float))):
        return
    extra = _gpus_beside_the_trainer(config)
    wanted = per_node + sum(extra.values())
    if device == "cpu":  # a "GPU" of Ray's is a worker process there
        there = int(told or 0)
        why = f"{wanted} worker processes are asked for and Ray is told of {there}: on the CPU a GPU of Ray's is one"
        keys: tuple[str, ...] = (GPUS_PER_NODE, RAY_GPUS)
        fix = f"++{RAY_GPUS}={wanted}"
    else:
        there = torch.cuda.device_count() if told is None else int(told)  # asks the driver, and starts no CUDA context
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"{wanted} GPUs are asked for"
        why += "".join(f", {gpus} of them by {key}" for key, gpus in extra.items()) + f", and {there} are there"
        why += f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        keys, fix = (GPUS_PER_NODE,), f"{GPUS_PER_NODE}={there - sum(extra.values())}"
        if there <= sum(extra.values()):
            fix = "run where nvidia-smi lists enough, with a torch for CUDA; or export VERL_PLATFORM=cpu for a trial"
    if wanted > there:
        yield wrong(config, "gpus", keys, why, fix)


def _gpus_beside_the_trainer(config: DictConfig) -> dict[str, int]:
    """By section, the GPUs that are not the trainer's: a rollout or a reward model with machines of its own."""
    extra = {}
    if _is_separate(config):
        extra[ROLLOUT] = _product(config, f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node")
    reward = "reward.reward_model"
    if OmegaConf.select(config, f"{reward}.enable_resource_pool"):
        extra[reward] = _product(config, f"{reward}.nnodes", f"{reward}.n_gpus_per_node")
    return {key: gpus for key, gpus in extra.items() if gpus}


def _is_separate(config: DictConfig) -> bool:
    mode = str(OmegaConf.select(config, TRAINER_MODE))
    return OmegaConf.select(config, "trainer.use_v1") is True and mode.endswith("separate_async")


def _product(config: DictConfig, *keys: str) -> int:
    product = 1
    for key in keys:
        product *= count(config, key) or 0
    return product


def _divisors(config: DictConfig, ranks: int) -> Iterator[Violation]:
    total = f"{ranks} ranks ({NODES} times {GPUS_PER_NODE})"
    seen = set()
    for role in roles_of(config):
        for entry in Facts.from_hydra(config, role).settings["sp_size"]:
            size = count(config, entry.key)
            if size and ranks % size and not (entry.key in seen or entry.follows):
                seen.add(entry.key)
                why = f"sequences cannot be spread over {size} of {total}: it does not divide them"
                yield wrong(config, "ulysses_ranks", entry.key, why, f"{entry.key}={_largest_divisor(ranks, size)}")
    tensor, data = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.data_parallel_size"
    server = (count(config, tensor) or 1) * (count(config, data) or 1)
    if OmegaConf.select(config, HYBRID_ENGINE) is False:  # servers have GPUs of their own
        keys = f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"
        ranks = _product(config, *keys)
        total = f"{ranks} GPUs of the rollout ({keys[0]} times {keys[1]})"
    if ranks % server:
        why = f"a server of the rollout takes {server} GPUs, which does not divide {total}"
        yield wrong(config, "rollout_ranks", tensor, why, f"{tensor}={_largest_divisor(ranks, server)} {data}=1")


def _separate(config: DictConfig) -> Iterator[Violation]:
    """What verl's separate_async trainer asserts when it is built."""
    batch, mini_batch = count(config, "data.train_batch_size"), count(config, MINI_BATCH)
    updates = count(config, f"{SEPARATE}.parameter_sync_step")
    if batch and mini_batch and updates and batch != updates * mini_batch:
        why = f"a batch must be {updates} mini-batches of {mini_batch} prompts ({SEPARATE}.parameter_sync_step)"
        fix = f"data.train_batch_size={updates * mini_batch}"
        yield wrong(config, "separate_batch", ("data.train_batch_size", MINI_BATCH), why, fix)
    for key in (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"):
        if not count(config, key):
            yield wrong(config, "separate_gpus", key, "the rollout needs GPUs of its own in this mode", f"{key}=1")
    engine = f"{ROLLOUT}.checkpoint_engine.backend"
    if OmegaConf.select(config, engine) == "naive":
        why = "weights cannot reach a rollout on other GPUs with it"
        yield wrong(config, "separate_weights", engine, why, f"{engine}=nccl")


def _largest_divisor(number: int, at_most: int) -> int:
    return max(size for size in range(1, min(number, at_most) + 1) if number % size == 0)
