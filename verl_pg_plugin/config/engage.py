"""Apply ``actor.use_prefix_grouper=True`` in verl's own ``python -m verl.trainer.main_ppo``.

verl's config has the flag and passes it to no engine. The sections that our entry point composes with Hydra are merged
into verl's composed config here.
"""

import copy
import sys
from importlib.resources import files

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_pg_plugin.config.keys import ACTOR, CRITIC, OPTIONS, REF, STRATEGIES, USE_PREFIX_GROUPER, VEOMNI
from verl_pg_plugin.config.old_log_prob import separate_forward_reasons
from verl_pg_plugin.config.preflight import check, log_warnings, logger, sharing_issues, unread_keys
from verl_pg_plugin.config.rollout import engage_rollouts, rollout_parts, summary
from verl_pg_plugin.issue import ConfigError

ENGINES = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", f"{CRITIC}.fsdp", f"{ACTOR}.{VEOMNI}", f"{REF}.{VEOMNI}")
STOCK_ENGINE_CONFIGS = ("verl.workers.config.FSDPEngineConfig", "verl.workers.config.VeOmniEngineConfig")


def engage(config: DictConfig, *, from_ours: bool = False) -> None:
    """Add our engine configs and options to a config whose flag is set, in place and idempotently, and check it.

    The user's settings in our sections are kept. ``from_ours`` checks stock runs too and runs verl's own validation.
    ConfigError if a rule refuses a setting.
    """
    add_sections(config)
    enabled = _is_enabled(config)
    if from_ours or enabled:
        check(config, asks_verl=from_ours)
        if enabled:
            logger.info("verl_pg_plugin: rollouts: %s", summary(rollout_parts(config)))
            reasons = separate_forward_reasons(config) or ["none by the configuration, they are those of the update"]
            for reason in reasons:
                logger.info("verl_pg_plugin: separate forward for old log-probs: %s", reason)
        return
    log_warnings(unread_keys(config))
    if OPTIONS in config:
        logger.warning("verl_pg_plugin: options of ++%s have no effect without %s=True", OPTIONS, USE_PREFIX_GROUPER)


def engage_or_exit(config: DictConfig, *, from_ours: bool = False) -> None:
    """Call ``engage`` for an entry point: errors exit with code 2 and no traceback.

    If Ray already runs, the caller is a recipe with its own trainer; a flag without our engine configs is an error.
    """
    if from_ours or not ray.is_initialized():
        try:
            engage(config, from_ours=from_ours)
        except (ConfigError, OmegaConfBaseException) as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(2) from None
    elif _is_enabled(config) and (errors := [issue for issue in sharing_issues(config) if not issue.is_warning]):
        raise ConfigError(errors)


def _is_enabled(config: DictConfig) -> bool:
    return OmegaConf.select(config, USE_PREFIX_GROUPER) not in (None, False)


def add_sections(config: DictConfig) -> None:
    """Add the sections of our entry point, below the user's settings, if the flag is set and we have the engine."""
    strategy = OmegaConf.select(config, f"{ACTOR}.strategy")
    group, key = (VEOMNI, VEOMNI) if strategy == VEOMNI else ("dp", "fsdp_config._target_")
    known = strategy in STRATEGIES and OmegaConf.select(config, f"{ACTOR}.{key}") is not None
    if not (known and _is_enabled(config)):
        return
    folder = files("verl_pg_plugin.config.hydra") / "prefix_grouper"
    options, engines = OmegaConf.load(str(folder / "options.yaml")), OmegaConf.load(str(folder / f"{group}.yaml"))
    del engines["defaults"]  # type: ignore[arg-type]  # for Hydra only
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
