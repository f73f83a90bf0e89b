"""Check a run's config before Ray starts: list every setting that is certain to fail with shared prefixes.

verl, Hydra and Ray report other faults within a minute: missing files, too few GPUs, unknown engines.
"""

import difflib
import inspect
import io
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from transformers import PretrainedConfig
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import validate_config
from verl.workers.config import CriticConfig

from verl_pg_plugin import compat
from verl_pg_plugin.after_import import registrations
from verl_pg_plugin.architectures import rope_length_limit
from verl_pg_plugin.config import rules
from verl_pg_plugin.config.checkpoint import read_checkpoint
from verl_pg_plugin.config.keys import (
    ACTOR,
    CRITIC,
    CRITIC_MODEL,
    MODEL,
    OPTIONS,
    REF,
    ROLLOUT,
    STRATEGIES,
    USE_PREFIX_GROUPER,
    USE_REMOVE_PADDING,
    VEOMNI,
    count_of,
)
from verl_pg_plugin.config.mode import Engine, mode_of
from verl_pg_plugin.config.options import PrefixGrouperOptions, option_issues
from verl_pg_plugin.issue import ConfigError, Issue

logger = logging.getLogger(__name__)

RAY_INIT = "ray_kwargs.ray_init"


def check(config: DictConfig, *, asks_verl: bool = False) -> None:
    """Log the warnings of ``preflight`` and raise one ConfigError that lists its errors, if it has any."""
    if versions := compat.untested():
        doctor = "python -m verl_pg_plugin doctor --full checks the names that the plugin patches"
        logger.warning("verl_pg_plugin: %s; %s", "; ".join(versions), doctor)
    issues = preflight(config, asks_verl=asks_verl)
    log_warnings(issues)
    if errors := [issue for issue in issues if not issue.is_warning]:
        raise ConfigError(errors)


def log_warnings(issues: Iterable[Issue]) -> None:
    for issue in issues:
        if issue.is_warning:
            logger.warning("verl_pg_plugin: %s: %s. Fix: %s", issue.where, issue.why, issue.fix)


def preflight(config: DictConfig, *, asks_verl: bool = False) -> list[Issue]:
    """Return the errors, then the warnings, that a run's config implies.

    Args:
        asks_verl: without errors, also run verl's own validation.

    Raises:
        omegaconf.errors.OmegaConfBaseException: if an interpolation cannot be resolved.
    """
    issues = sharing_issues(config)
    issues = [issue for issue in issues if not _is_duplicate(config, issue, issues)]
    if asks_verl and all(issue.is_warning for issue in issues):
        issues += _verls_validation(config)
    return sorted(issues, key=lambda issue: issue.is_warning)


def sharing_issues(config: DictConfig) -> list[Issue]:
    """Return the issues of a run's flags, options, checkpoints and engines."""
    issues, shares = [*_flag_issues(config)], mode_of(config).shares_prefixes
    if shares:
        issues += [*_registration_issues(), *_combinations(config), *_budgets(config), *_losses_by_cut(config)]
    read = cache(partial(read_checkpoint, config))
    for role in rules.roles_of(config):
        hf_config, unsupported = read(CRITIC_MODEL if role == CRITIC else MODEL) if shares else (None, [])
        # The rules need no architecture that is refused anyway.
        engine = rules.engine_of(config, role, None if unsupported else hf_config)
        issues += [*unsupported, *_engine_issues(config, engine)]
        if engine.hf_config is not None:
            issues += _long_sequences(config, engine.hf_config)
    return list(dict.fromkeys(issues))


def _registration_issues() -> Iterator[Issue]:
    """Check that the engines import and register; verl would swallow the exception."""
    try:
        for register in registrations:
            register()
    except Exception as error:  # an import may raise anything
        why = f"engines are not registered ({type(error).__name__}: {error})"
        yield Issue(f"{USE_PREFIX_GROUPER}=True", why, f"run python -m verl_pg_plugin doctor, or {rules.STOCK}")


def _long_sequences(config: DictConfig, hf_config: PretrainedConfig) -> Iterator[Issue]:
    """Warn of sequences beyond ``architectures.rope_length_limit``, which end the run."""
    prompt, response = (count_of(config, f"data.max_{part}_length") for part in ("prompt", "response"))
    if (limit := rope_length_limit(hf_config)) is not None and prompt + response > limit:
        why = f"a sequence of over {limit} tokens would change the rotary frequencies of others, and ends the run"
        fix = f"data.max_response_length={limit - prompt}" if limit > prompt else rules.STOCK
        yield Issue(f"data.max_response_length={response}", why, fix, is_warning=True)


def _flag_issues(config: DictConfig) -> Iterator[Issue]:
    """Check the values of the flags and of the options."""
    for key in (USE_PREFIX_GROUPER, USE_REMOVE_PADDING):
        flag = OmegaConf.select(config, key)
        if flag not in (None, True, False):  # 1 and 0 pass; the string "no" would be true
            why = "is not a boolean; the values are True and False without quotes"
            yield Issue(f"{key}={flag}", why, f"{key}=True or False")
    yield from unread_keys(config)
    section = OmegaConf.select(config, OPTIONS)
    if isinstance(section, DictConfig):
        options = {str(name): OmegaConf.select(section, str(name)) for name in section if name != "_target_"}
        yield from option_issues(options)
        if not mode_of(config).shares_prefixes and (defaults := vars(PrefixGrouperOptions())) | options != defaults:
            why = f"the options of ++{OPTIONS} have no effect"
            yield Issue(f"{USE_PREFIX_GROUPER}=False", why, f"{USE_PREFIX_GROUPER}=True", is_warning=True)
    elif OPTIONS in config:
        fix = f"++{OPTIONS}.<option>=<value>, or remove it"
        yield Issue(f"++{OPTIONS}={section}", "is not a section of options", fix)


def unread_keys(config: DictConfig) -> Iterator[Issue]:
    """Warn of keys with "prefix" in them that look like the flag or an option of this plugin, and are neither."""
    flag, cached = USE_PREFIX_GROUPER.rpartition(".")[2], "prefix_cache"
    ours = {flag: f"{USE_PREFIX_GROUPER}=True"}
    ours |= {OPTIONS: f"++{OPTIONS}.<option>=<value>", cached: f"++{OPTIONS}.{cached}=<value>"}
    for where, section, read in ("", config, OPTIONS), (f"{ACTOR}.", OmegaConf.select(config, ACTOR) or (), flag):
        for name in map(str, section):
            if "prefix" in name and name != read:
                (close,) = difflib.get_close_matches(name, ours, n=1, cutoff=0)
                why, fix = "this plugin does not read it", f"did you mean {ours[close]}?"
                yield Issue(f"{where}{name}", why, fix, is_warning=True)


def _combinations(config: DictConfig) -> Iterator[Issue]:
    """Check settings of several sections that conflict when prefixes are shared."""
    batch, streamed = count_of(config, "data.train_batch_size"), count_of(config, "async_training.require_batches")
    if streamed or str(OmegaConf.select(config, "trainer.v1.trainer_mode")).endswith("separate_async"):
        batch = max(streamed, 1) * count_of(config, f"{ACTOR}.ppo_mini_batch_size")
    n = count_of(config, f"{ROLLOUT}.n")
    for role in rules.roles_of(config):
        engine, prompts = rules.engine_of(config, role), count_of(config, mini := f"{role}.ppo_mini_batch_size")
        if batch > prompts and OmegaConf.select(config, key := f"{role}.shuffle"):
            yield Issue(f"{key}=True", "mini-batches get sequences, not groups", f"{key}=False", is_warning=True)
        ranks = engine.get("run_ranks") // engine.sp_size
        if role == REF or not prompts or not ranks or not n:
            continue
        step = ranks // math.gcd(ranks, n)
        more = -(-max(prompts, ranks) // step) * step
        fix = f"{mini}={more}" + f" data.train_batch_size={more}" * (0 < batch < more)
        # verl's workers would fail at the first update.
        if prompts * n % ranks and not OmegaConf.select(config, "trainer.val_only"):
            why = f"{prompts} prompts x {ROLLOUT}.n={n} sequences do not divide into {ranks} data-parallel ranks"
            yield Issue(f"{mini}={prompts}", why, fix)
        elif prompts < ranks:
            why = f"fewer groups than the {ranks} data-parallel ranks, so groups are cut across ranks"
            yield Issue(f"{mini}={prompts}", why, fix, is_warning=True)
    if OmegaConf.select(config, fused := f"{MODEL}.use_fused_kernels"):
        loss_mode = OmegaConf.select(config, "distillation.distillation_loss.loss_mode")
        if OmegaConf.select(config, "distillation.enabled") and loss_mode == "forward_kl_topk":
            why = f"verl's fused kernels do not compute the logits that {loss_mode} reads"
            yield Issue(f"{fused}=True", why, f"{fused}=False")
        if OmegaConf.select(config, sums := f"{ACTOR}.calculate_sum_pi_squared"):
            why = "verl's fused kernels do not compute the probabilities that it sums"
            yield Issue(f"{sums}=True", why, f"{sums}=False")
    actor, ref = rules.engine_of(config, ACTOR), rules.engine_of(config, REF)
    rollouts = f"{ROLLOUT}.enable_rollout_routing_replay"
    if actor.on_veomni and actor.get("router_replay.mode") == "R3" and not OmegaConf.select(config, rollouts):
        why = "R3 replays the experts of the rollouts, and they return none"
        yield Issue(f"{actor.section}.router_replay.mode=R3", why, f"{rollouts}=True")
    if REF in rules.roles_of(config) and actor.on_veomni and ref.on_veomni and actor.sp_size != ref.sp_size:
        why = f"VeOmni uses the size of a process's first engine, {actor.sp_key}={actor.sp_size}"
        yield Issue(f"{ref.sp_key}={ref.sp_size}", why, f"{ref.sp_key}={actor.sp_size}")


def _losses_by_cut(config: DictConfig) -> Iterator[Issue]:
    """Warn of losses that average or select within a micro-batch, because shared prefixes change micro-batches."""
    section = f"{ACTOR}.policy_loss"
    settings = [(f"{section}.loss_mode", mode, rules.STOCK) for mode in ("geo_mean", "clip_cov", "kl_cov")]
    policy_loss = OmegaConf.select(config, section)
    # Actors read this copy of the settings alone; it may be an interpolation.
    applied = OmegaConf.select(config, f"{section}.rollout_correction.loss_type") == "reinforce"
    if applied and policy_loss.get("loss_mode") == "bypass_mode":
        is_interpolated = OmegaConf.is_interpolation(policy_loss, "rollout_correction")
        key = f"{'algorithm' if is_interpolated else section}.rollout_correction.rollout_is_batch_normalize"
        settings.append((key, "True", f"{key}=False"))
    for role in rules.roles_of(config):
        if role != REF and OmegaConf.select(config, factor := f"{role}.loss_scale_factor") is None:
            fix = f"{factor}={OmegaConf.select(config, 'data.max_response_length')}"
            settings.append((f"{role}.loss_agg_mode", "seq-mean-token-sum-norm", fix))
    for key, value, fix in settings:
        if str(OmegaConf.select(config, key)) == value:
            why = "depends on micro-batch boundaries, which shared prefixes change: gradients differ from verl's"
            yield Issue(f"{key}={value}", why, fix, is_warning=True)


def _engine_issues(config: DictConfig, engine: Engine) -> Iterator[Issue]:
    """Check the engine that verl would build for a role, by the rules too."""
    key, strategy = f"{engine.role}.strategy", engine.get("strategy")
    shares = mode_of(config).shares_prefixes
    if strategy not in STRATEGIES:
        if shares:
            engines = f"FSDP and VeOmni engines ({', '.join(STRATEGIES)})"
            why = f"shared prefixes are implemented for verl's {engines} only"
            yield Issue(f"{key}={strategy}", why, f"model_engine=dp {key}=fsdp2")
        return
    if (shares or engine.on_veomni) and not engine.get("_target_"):
        group, chosen = VEOMNI if engine.on_veomni else "dp", OmegaConf.select(config, "model_engine")
        why = f"the config has no {engine.section}._target_, which only model_engine={group} sets"
        fix = "leave out the override that removes it" if chosen == group else f"model_engine={group}"
        yield Issue(f"{key}={strategy}", why, fix)
        return
    if not (engine.on_veomni and engine.role == CRITIC):  # refused by a rule
        yield from _engine_config_issues(config, engine, shares)
    for rule in rules.RULES if shares else ():
        uncertain = rule in rules.MACHINE_RULES and joins_cluster(config)
        for issue in rule(engine):
            yield replace(issue, is_warning=issue.is_warning or uncertain)


def _engine_config_issues(config: DictConfig, engine: Engine, shares: bool) -> Iterator[Issue]:
    """Check that the engine config has the flag and the options, with the values of the run."""
    target, key = engine.get("_target_"), f"{engine.section}._target_"
    ours = f"verl_pg_plugin.config.PrefixGrouper{'VeOmni' if engine.on_veomni else ''}EngineConfig"
    try:
        takes_options = target and OPTIONS in getattr(get_class(str(target)), "__dataclass_fields__", {})
    except Exception:  # Hydra reports what the import raises
        return
    if shares and not takes_options:
        why = f"without this plugin's engine config verl ignores {USE_PREFIX_GROUPER}"
        yield Issue(f"{key}={target}", why, f"++{key}={ours}")
    key = f"{engine.section}.use_prefix_grouper"
    if takes_options and bool(flag := OmegaConf.select(config, key)) != shares:
        why = f"must equal {USE_PREFIX_GROUPER}, so that old, ref and new log-probs use the same computation"
        yield Issue(f"{key}={flag}", why, f"++{key}={shares}")
    options, own = OmegaConf.select(config, OPTIONS), OmegaConf.select(config, key := f"{engine.section}.{OPTIONS}")
    if takes_options and shares and options and not own:
        yield Issue(f"{key}={own}", f"the engine would ignore {OPTIONS}", f"'++{key}=${{{OPTIONS}}}'")
    elif shares and isinstance(own, DictConfig) and own != options:  # set for this role
        yield from option_issues({str(name): own[name] for name in own}, f"++{key}")


def _is_duplicate(config: DictConfig, issue: Issue, issues: list[Issue]) -> bool:
    """Return True if the setting interpolates another one that has the same issue."""

    def interpolated(key: str) -> bool:
        parent, _, leaf = key.rpartition(".")
        section = OmegaConf.select(config, parent) if parent else None
        return isinstance(section, DictConfig) and leaf in section and OmegaConf.is_interpolation(section, leaf)

    same = [other.key for other in issues if other.why == issue.why and other.key != issue.key]
    return interpolated(issue.key) and not all(map(interpolated, same))


def joins_cluster(config: DictConfig) -> bool:
    """Return True if the run's processes may use other machines or packages than this one."""
    address = OmegaConf.select(config, f"{RAY_INIT}.address") or os.environ.get("RAY_ADDRESS")
    interpreters = ("py_executable", "pip", "uv", "conda", "container", "image_uri")
    if any(OmegaConf.select(config, f"{RAY_INIT}.runtime_env.{key}") for key in interpreters):
        return True
    if address is not None:
        return bool(address != "local")
    # Without an address ray.init joins a cluster that was started on this machine.
    return Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster").exists()


def _budgets(config: DictConfig) -> Iterator[Issue]:
    """Warn of token budgets below the longest possible sequence; such a sequence ends the run."""
    longest = sum(count_of(config, f"data.max_{part}_length") for part in ("prompt", "response"))
    bypasses = OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")
    for section in (*rules.roles_of(config), *(() if bypasses else (ROLLOUT,))):
        engine, default = rules.engine_of(config, ACTOR if section == ROLLOUT else section), 0
        switch, kind = ("log_prob_", "log_prob") if section in (REF, ROLLOUT) else ("", "ppo")
        by_tokens = OmegaConf.select(config, f"{section}.{switch}use_dynamic_bsz")
        if section == CRITIC:  # verl's trainers do not pass on its switch
            by_tokens = engine.get("use_dynamic_bsz") is not False
            kind = "ppo_infer" if OmegaConf.select(config, "trainer.use_v1") else kind  # for updates too
            default = CriticConfig.ppo_infer_max_token_len_per_gpu  # verl's YAML files lack the key
        limit = count_of(config, key := f"{section}.{kind}_max_token_len_per_gpu") or default
        if by_tokens and 0 < (budget := limit * engine.sp_size) < longest - 1:
            why = f"holds {budget} tokens, and a longer sequence (up to {longest - 1}) would end the run"
            fix = f"{'++' * (section == CRITIC)}{key}={-(-(longest - 1) * limit // budget)}"
            yield Issue(f"{key}={limit}", why, fix, is_warning=True)


def _verls_validation(config: DictConfig) -> Iterator[Issue]:
    """Return the error that verl's own validation raises for this config, if any."""
    validate, roles = inspect.unwrap(validate_config), rules.roles_of(config)  # without our hook
    try:
        with redirect_stdout(io.StringIO()):  # it prints its success
            validate(config, need_reference_policy(config), CRITIC in roles)
    except Exception as error:  # the run would end here
        why = f"verl's own validation refuses it: {type(error).__name__}: {' '.join(str(error).split())}"
        yield Issue("", why, "change the setting that it names")
