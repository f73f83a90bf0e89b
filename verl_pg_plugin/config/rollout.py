"""Decide from a run's config which parts of ``rollout/`` it gets, and add their settings to the config."""

from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.keys import OPTIONS, ROLLOUT, count_of
from verl_pg_plugin.rollout import SHARED_DECODE, VLLM_VERSIONS

ROLLOUT_OPTION = f"++{OPTIONS}.rollout"
ROUTER, SAMPLER = f"{ROLLOUT}.router_config_path", "trainer.v1.sampler"
ROUTER_FILE = str(files("verl_pg_plugin.rollout") / "router.yaml")
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
MIN_SHARED_TOKENS = 24_000
"""Prompt-token reads that a server must save per decode step: twice the break-even point of a 4B model on one H200."""

UNSUPPORTED = (
    *("attention_backend", "attention_config", "kv_cache_dtype", "speculative_config", "decode_context_parallel_size"),
    *("data_parallel_size", "compilation_config.cudagraph_mode"),
)
"""vLLM settings that turn shared decode off unless they have their defaults."""

OUR_SAMPLER = {"path": "pkg://verl_pg_plugin.rollout.replay_buffer", "name": "prompt_replay_buffer"}


class Part(NamedTuple):
    """A part of ``rollout/``: its name, why it is off (empty if it is on), and the settings that turn it on."""

    name: str
    obstacle: str
    settings: dict[str, object]


def rollout_parts(config: DictConfig) -> list[Part]:
    """Return all parts, for a config before or after ``engage_rollouts``."""
    sampler: dict[str, object] = {f"{SAMPLER}.custom_sampler.{key}": value for key, value in OUR_SAMPLER.items()}
    parts = [
        Part("routing by prompt", _routing_obstacle(config), {ROUTER: ROUTER_FILE}),
        Part("shared decode", _decode_obstacle(config), {f"{VLLM}.additional_config.{SHARED_DECODE}": True}),
        Part("no wait for the sampler", _sampler_obstacle(config), sampler),
    ]
    option = OmegaConf.select(config, f"{OPTIONS}.rollout")
    return [part if option == "auto" else part._replace(obstacle=f"{ROLLOUT_OPTION}={option}") for part in parts]


def engage_rollouts(config: DictConfig) -> None:
    """Add the settings of all parts that are on, in place and idempotently."""
    for part in rollout_parts(config):
        if not part.obstacle:
            for key, value in part.settings.items():
                OmegaConf.update(config, key, value, force_add=True)


def summary(parts: list[Part]) -> str:
    """Return a log line: each part, on or off, and why."""
    return "; ".join(f"{part.name} is {f'off ({part.obstacle})' if part.obstacle else 'on'}" for part in parts)


def num_servers(config: DictConfig) -> int:
    """Return the number of rollout servers of a run, at least 1."""
    nodes = count_of(config, f"{ROLLOUT}.nnodes") or count_of(config, "trainer.nnodes")
    sizes = [count_of(config, f"{ROLLOUT}.{kind}_parallel_size") for kind in ("tensor_model", "data", "pipeline_model")]
    gpus = nodes * count_of(config, f"{ROLLOUT}.n_gpus_per_node")
    for size in sizes:
        gpus //= max(size, 1)
    return max(gpus, 1)


def _routing_obstacle(config: DictConfig) -> str:
    if (path := OmegaConf.select(config, ROUTER)) not in (None, ROUTER_FILE):
        return f"{ROUTER}={path}"
    if OmegaConf.select(config, f"{ROLLOUT}.full_determinism"):
        return f"{ROLLOUT}.full_determinism=True"
    if num_servers(config) == 1:
        return "there is one server"
    # Without shared decode, an even load is worth as much as fewer prefills.
    on_cpu = OmegaConf.select(config, f"{ROLLOUT}.name") == "hf"
    return "" if on_cpu or not _decode_obstacle(config) else "it pays only with shared decode"


def _decode_obstacle(config: DictConfig) -> str:
    if (name := OmegaConf.select(config, f"{ROLLOUT}.name")) != "vllm":
        return f"{ROLLOUT}.name={name}" if name else "no rollout engine is set"
    # The vllm section overrides the rollout section.
    for key, supported in {"full_determinism": False, "enforce_eager": False, "enable_prefix_caching": True}.items():
        section = ROLLOUT if OmegaConf.select(config, f"{VLLM}.{key}") is None else VLLM
        if (value := OmegaConf.select(config, f"{section}.{key}")) != supported:
            return f"{section}.{key}={value}"
    for key in UNSUPPORTED:
        if (value := OmegaConf.select(config, f"{VLLM}.{key}")) not in (None, 1, "auto"):
            return f"{VLLM}.{key}={value}"
    additional = OmegaConf.select(config, f"{VLLM}.additional_config")
    if additional is not None and not isinstance(additional, DictConfig):
        return f"{VLLM}.additional_config={additional} is not a mapping"
    if additional is not None and (switch := additional.get(SHARED_DECODE)) is not None:
        return "" if switch else f"{VLLM}.additional_config.{SHARED_DECODE}={switch}"
    if count_of(config, f"{ROLLOUT}.data_parallel_size") > 1:
        return f"{ROLLOUT}.data_parallel_size={count_of(config, f'{ROLLOUT}.data_parallel_size')}"
    try:
        if (installed := version("vllm")) not in VLLM_VERSIONS:
            return f"vllm {installed} is outside {VLLM_VERSIONS}"
    except PackageNotFoundError:
        pass  # the workers may have vLLM
    n, batch = count_of(config, f"{ROLLOUT}.n"), count_of(config, "data.train_batch_size")
    if not batch:
        return "data.train_batch_size does not give the number of prompts per server"
    saved = max(n - 1, 0) * -(-batch // num_servers(config)) * count_of(config, "data.max_prompt_length")
    if saved < MIN_SHARED_TOKENS:
        return f"a server's samples share at most {saved:,} prompt tokens; it pays from {MIN_SHARED_TOKENS:,}"
    return ""


def _sampler_obstacle(config: DictConfig) -> str:
    if not OmegaConf.select(config, "trainer.use_v1"):
        return "trainer.use_v1=False: V0 does not wait"
    if (name := OmegaConf.select(config, f"{SAMPLER}.custom_sampler.name")) not in (None, OUR_SAMPLER["name"]):
        return f"{SAMPLER}.custom_sampler.name={name}"
    # verl passes these to its own sampler only.
    for key in ("algorithm.filter_groups.enable", f"{SAMPLER}.sync_refill_failed_groups"):
        if OmegaConf.select(config, key):
            return f"{key}=True"
    # The hybrid trainer counts waits longer than the polling interval as idle time.
    hybrid = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    return f"{hybrid}=True" if OmegaConf.select(config, hybrid) else ""
