"""What a run asks of the machine it starts on: GPUs, a rollout engine, files, and checkpoints that can share prefixes.

Each is cheap to look at, and certain or a warning. Neither the hub nor code of a checkpoint's own is asked: what is
not on this machine, the workers find out.
"""

import math
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from omegaconf import DictConfig, ListConfig, OmegaConf
from transformers import AutoConfig, PretrainedConfig
from verl.utils.device import get_device_name
from verl.utils.import_utils import resolve_config_path
from verl.utils.model import update_model_config

from verl_pg_plugin.architectures import OVERRIDE, architecture_issues
from verl_pg_plugin.config.keys import CRITIC_MODEL, MODEL, ROLLOUT, USE_PREFIX_GROUPER
from verl_pg_plugin.config.mode import mode_of
from verl_pg_plugin.issue import Issue
from verl_pg_plugin.modalities import modality_obstacles

GPUS_PER_NODE, RAY_GPUS = "trainer.n_gpus_per_node", "ray_kwargs.ray_init.num_gpus"
PACKAGES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""What a rollout engine of verl's imports."""
FILES = ("reward.custom_reward_function.path", "data.custom_cls.path")
TOOLS = "multi_turn.function_tool_path", "multi_turn.tool_config_path"
FILES_BESIDE_VERL = tuple(f"{ROLLOUT}.{name}" for name in ("agent.agent_loop_config_path", *TOOLS))
"""Files; verl looks for relative ones in folders of its own too."""
TEACHERS, REWARD_MODEL = "distillation.teacher_models", "reward.reward_model"
HERE = ("/", ".", "~")
"""How a path of this machine begins, whether there is something or not, and no hub id."""


def machine_issues(config: DictConfig) -> Iterator[Issue]:
    """All that is asked for and not there."""
    yield from _gpus(config)
    key, name = f"{ROLLOUT}.name", OmegaConf.select(config, f"{ROLLOUT}.name")
    if name in PACKAGES and not getattr(find_spec(PACKAGES[name]), "origin", None):  # a folder of that name has none
        fix = f"pip install 'verl[{name}]', or {key}=<an engine you have>"
        yield Issue(f"{key}={name}", f"{PACKAGES[name]} is not installed in {sys.prefix}", fix)
    yield from _paths(config)
    yield from _data(config)


def count_of(config: DictConfig, key: str) -> int:
    """A positive number without its fraction, which limits of micro-batches may have; 0 for all else."""
    value = OmegaConf.select(config, key)
    return int(value) if type(value) in (int, float) and 1 <= value < math.inf else 0


def _gpus(config: DictConfig) -> Iterator[Issue]:
    """GPUs that a run of one node asks for."""
    asked = count_of(config, GPUS_PER_NODE)
    told = OmegaConf.select(config, RAY_GPUS)
    device = get_device_name()
    known = asked and (told is None or type(told) in (int, float)) and device in ("cuda", "cpu")
    if not known or OmegaConf.select(config, "trainer.nnodes") != 1:
        return
    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    pools = {ROLLOUT: "trainer.use_v1"} if mode.endswith("separate_async") else {}  # of GPUs of their own, by switch
    pools |= {"distillation": "distillation.enabled", REWARD_MODEL: f"{REWARD_MODEL}.enable_resource_pool"}
    on = [pool for pool, switch in pools.items() if OmegaConf.select(config, switch) is True]
    beside = sum(count_of(config, f"{pool}.nnodes") * count_of(config, f"{pool}.n_gpus_per_node") for pool in on)
    wanted = asked + beside
    there = count_of(config, RAY_GPUS)
    setting = f"{GPUS_PER_NODE}={asked}"
    if device == "cpu":  # a "GPU" of Ray's is a worker process there
        why = f"{wanted} worker processes are asked for and Ray is told of {there}: on the CPU a GPU of Ray's is one"
        setting, fix = f"{setting}, {RAY_GPUS}={told}", f"++{RAY_GPUS}={wanted}"
    else:
        if told is None:
            there = torch.cuda.device_count()  # asks the driver, and starts no CUDA context
        why = f"{wanted} GPUs are asked for, and {there} are there"
        fix = f"{GPUS_PER_NODE}={there - beside}"
        if there <= beside:
            fix = "run where nvidia-smi lists enough, with a torch for CUDA; or export VERL_PLATFORM=cpu for a trial"
    if wanted > there:
        yield Issue(setting, why, fix)


def teachers_of(config: DictConfig) -> list[str]:
    """Sections of the teachers that verl asks: it drops the one of its own name beside others."""
    teachers: Any = OmegaConf.select(config, TEACHERS)
    if OmegaConf.select(config, "distillation.enabled") is not True or not isinstance(teachers, DictConfig):
        return []
    return [f"{TEACHERS}.{name}" for name in map(str, teachers) if name != "teacher_model" or len(teachers) == 1]


def _paths(config: DictConfig) -> Iterator[Issue]:
    """Files and folders that are named and not there."""
    adapted = [section for section in (MODEL, CRITIC_MODEL) if count_of(config, f"{section}.lora_rank")]
    folders = [f"{section}.lora_adapter_path" for section in adapted]
    rewards = [REWARD_MODEL] if OmegaConf.select(config, f"{REWARD_MODEL}.enable") is True else []
    folders += [f"{served}.model_path" for served in (*teachers_of(config), *rewards)]
    for key in (*FILES, *FILES_BESIDE_VERL, *folders):
        path, kind = OmegaConf.select(config, key), "folder" if key in folders else "file"
        if not isinstance(path, str) or not path or "://" in path or (key in folders and not path.startswith(HERE)):
            continue
        try:
            is_there = Path(resolve_config_path(path) if key in FILES_BESIDE_VERL else path).exists()
        except FileNotFoundError:
            is_there = False
        if not is_there:
            yield Issue(f"{key}={path}", f"no such {kind}", f"{key}=<{kind}>{', or a hub id' * (kind == 'folder')}")


def _data(config: DictConfig) -> Iterator[Issue]:
    """Files that are not there, and the column of prompts; data sets of a class of the user's own are that class's."""
    if OmegaConf.select(config, "data.custom_cls.path"):
        return
    prompt = str(OmegaConf.select(config, "data.prompt_key"))
    for key in ("data.train_files", "data.val_files"):
        value: Any = OmegaConf.select(config, key)
        for path in map(str, value if isinstance(value, (list, ListConfig)) else [value] if value else []):
            if "://" in path or any(sign in path for sign in "*?["):
                continue  # on another machine, or a pattern, which ``datasets`` expands
            setting, fix = f"{key}={path}", f"{key}=<file>.parquet"
            if not Path(path).is_file():
                why = "is a folder" if Path(path).is_dir() else "does not exist"
                yield Issue(setting, why + ": verl does not expand ~" * path.startswith("~"), fix)
                continue
            if not path.endswith(".parquet"):
                continue
            try:
                names = pq.read_schema(path).names
            except (pa.ArrowException, OSError) as error:
                yield Issue(setting, f"cannot be read as parquet: {str(error).partition(chr(10))[0]}", fix)
                continue
            if prompt not in names:
                likely = next((name for name in ("prompt", "messages") if name in names), "<column of the messages>")
                why = f"{path} has no column {prompt!r}; it has {', '.join(names)}"
                yield Issue(f"data.prompt_key={prompt}, {key}={path}", why, f"data.prompt_key={likely}")


def read_checkpoint(config: DictConfig, section: str = MODEL) -> tuple[PretrainedConfig | None, list[Issue]]:
    """Config of the local or cached checkpoint of a model section, overrides applied, and what is wrong with it.

    The config is None where there is none on this machine, or none that can be read without code of the checkpoint's
    own. The architecture counts only in the modes that share prefixes.
    """
    path, shares = str(OmegaConf.select(config, f"{section}.path")), mode_of(config).shares_prefixes
    if path.startswith(HERE) and not Path(path).is_dir():
        tilde = " (verl does not expand ~)" if path.startswith("~") else ""
        fix = f"{section}.path=<folder written by save_pretrained, or a hub id>{tilde}"
        return None, [Issue(f"{section}.path={path}", "no such folder", fix)]
    key = f"{section}.{'hf_config_path' if OmegaConf.select(config, f'{section}.hf_config_path') else 'path'}"
    folder = source = str(OmegaConf.select(config, key))
    setting = f"{key}={source}"
    if not (source.startswith(HERE) or Path(source).is_dir()):
        try:
            config_json = try_to_load_from_cache(source, "config.json")
        except HFValidationError:
            fix = f"{key}=<folder written by save_pretrained, or a hub id>"
            return None, [] if "://" in source else [Issue(setting, "no such folder", fix)]
        if not isinstance(config_json, str):
            return None, []
        folder = str(Path(config_json).parent)
    if not Path(folder, "config.json").is_file():
        fix = f"{key}=<folder written by save_pretrained>"
        return None, [Issue(setting, "the folder has no config.json", fix)]
    trusted = bool(OmegaConf.select(config, f"{section}.trust_remote_code"))
    hf_config, own = None, f"{section}.override_config"
    stated: dict[str, Any] = {}
    others = f"another checkpoint, or {USE_PREFIX_GROUPER}=False (stock verl)"
    try:
        stated, _ = PretrainedConfig.get_config_dict(folder)
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        entry = OmegaConf.select(config, own)  # applied as verl's HFModelConfig applies it
        overrides: Any = OmegaConf.to_container(entry, resolve=True) if isinstance(entry, DictConfig) else {}
        if "model_config" in overrides:
            own, overrides = f"{own}.model_config", overrides["model_config"]
        update_model_config(hf_config, override_config_kwargs=overrides)
    except Exception as error:  # whatever a class of configs raises, of overrides that do not fit it too
        brings_code = "auto_map" in stated
        if not shares or (trusted and brings_code) or OmegaConf.select(config, f"{section}.external_lib"):
            # Code of the user's own may read it, in the workers, and mostly hands on what it states.
            rope = stated.get("rope_parameters") or stated.get("rope_scaling")  # the older name
            raw = {"model_type": ""} | stated | {"rope_parameters": rope if isinstance(rope, dict) else {}}
            found = modality_obstacles(SimpleNamespace(**raw)) if shares else []
            unsure = "config.json says that {}; the engine refuses it unless code of its own leaves that out"
            return None, [Issue(setting, unsure.format(why), others, is_warning=True) for why in found]
        if hf_config is not None:
            why = f"does not fit the checkpoint's config: {' '.join(str(error).split())}"
            return None, [Issue(f"{own}={overrides}", why, f"correct it, or write it into {folder}/config.json")]
        why = f"transformers cannot read its config.json: {str(error).strip().partition(chr(10))[0]}"
        newer = f"{section}.trust_remote_code=True if you trust it" if brings_code else "install a newer transformers"
        fix = f"repair {folder}/config.json, or {newer}"
        return None, [Issue(setting, why, fix)]
    if not shares:
        return hf_config, []
    if len(hf_config.architectures or ()) != 1:
        why = f"verl wants exactly one entry under architectures, config.json has {hf_config.architectures}"
        fix = f'write "architectures": ["<its model class>"] into {folder}/config.json'
        return hf_config, [Issue(setting, why, fix)]
    issues = []
    for issue in architecture_issues(hf_config, trusted, value_model=section == CRITIC_MODEL):
        fix = issue.fix.replace(OVERRIDE, own) or others
        issues.append(Issue(issue.setting.replace(OVERRIDE, own) or setting, issue.why, fix))
    return hf_config, issues
