"""Make ``actor.use_prefix_grouper=True`` mean something in verl's own ``python -m verl.trainer.main_ppo``.

verl's config has the flag and no field that carries it to the engines. What our entry point composes with Hydra is put
into verl's composed config here.
"""

import copy
import sys
from importlib.resources import files

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_pg_plugin.config.keys import ACTOR, CRITIC, OPTIONS, REF, STRATEGIES, USE_PREFIX_GROUPER, VEOMNI
from verl_pg_plugin.config.preflight import check, logger, sharing_issues
from verl_pg_plugin.config.rollout import engage_rollouts, rollout_parts, summary
from verl_pg_plugin.issue import ConfigError

ENGINES = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", f"{CRITIC}.fsdp", f"{ACTOR}.{VEOMNI}", f"{REF}.{VEOMNI}")
STOCK_ENGINE_CONFIGS = ("verl.workers.config.FSDPEngineConfig", "verl.workers.config.VeOmniEngineConfig")


def engage(config: DictConfig, *, from_ours: bool = False) -> None:
    """Give a config whose flag is set our engine configs and options, in place; again changes nothing.

    It is composed from verl's ``ppo_trainer``. What the user has set in a section of ours stays, for the rules to look
    at, which may raise ConfigError. Our entry point has stock runs looked at too, and verl's validation asked.
    """
    add_sections(config)
    if from_ours or _asks(config):
        check(config, asks_verl=from_ours)
        if _asks(config):
            logger.info("verl_pg_plugin: rollouts: %s", summary(rollout_parts(config)))
    elif OPTIONS in config:
        logger.warning("verl_pg_plugin: options of ++%s do nothing without %s=True", OPTIONS, USE_PREFIX_GROUPER)


def engage_or_exit(config: DictConfig, *, from_ours: bool = False) -> None:
    """``engage`` for entry points: errors end the process without a traceback, with exit code 2.

    Where Ray runs already this is a recipe with trainers of its own, which asks for our engines itself or gets none: a
    flag that would do nothing is a ConfigError.
    """
    if from_ours or not ray.is_initialized():
        try:
            engage(config, from_ours=from_ours)
        except (ConfigError, OmegaConfBaseException) as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(2) from None
    elif _asks(config) and (found := [issue for issue in sharing_issues(config) if not issue.is_warning]):
        raise ConfigError(found)


def _asks(config: DictConfig) -> bool:
    return OmegaConf.select(config, USE_PREFIX_GROUPER) not in (None, False)


def add_sections(config: DictConfig) -> None:
    """What our entry point composes, below what the user has set, where the flag is set and an engine of ours runs."""
    strategy = OmegaConf.select(config, f"{ACTOR}.strategy")
    group, key = (VEOMNI, VEOMNI) if strategy == VEOMNI else ("dp", "fsdp_config._target_")
    known = strategy in STRATEGIES and OmegaConf.select(config, f"{ACTOR}.{key}") is not None
    if not (known and _asks(config)):
        return
    folder = files("verl_pg_plugin.config.hydra") / "prefix_grouper"
    options, engines = OmegaConf.load(str(folder / "options.yaml")), OmegaConf.load(str(folder / f"{group}.yaml"))
    del engines["defaults"]  # type: ignore[arg-type]  # the options, as Hydra is told
    users = copy.deepcopy(config)
    with open_dict(users):
        for engine in ENGINES:
            section = OmegaConf.select(users, engine)
            if section and section.get("_target_") in STOCK_ENGINE_CONFIGS:
                del section["_target_"]
    with open_dict(config):
        config.merge_with(options, engines, users)
        if OmegaConf.select(config, f"{OPTIONS}.rollout") == "auto":
            engage_rollouts(config)
