"""The flag selects the mode through verl's entry point and ours, or ends the run with one message."""

import sys
from contextlib import nullcontext

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from verl.trainer import main_ppo as verls_main_ppo
from verl.trainer.main_ppo_v0 import TaskRunner
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.config.config_support import FLAGS, compose_config, compose_stock
from tests.config.test_rules import engine_configs
from tests.fresh import run_fresh
from verl_pg_plugin import main_ppo
from verl_pg_plugin.config import Mode, PrefixGrouperEngineConfig, PrefixGrouperOptions, mode_of
from verl_pg_plugin.config.engage import engage, engage_or_exit
from verl_pg_plugin.config.keys import ACTOR, REF
from verl_pg_plugin.config.mode import mode_by_flags
from verl_pg_plugin.engine.registration import PrefixGrouperFSDPEngineWithLMHead
from verl_pg_plugin.issue import ConfigError

QAT = f"{ACTOR}.fsdp_config.qat"
FLAG = f"{ACTOR}.use_prefix_grouper=True"  # verl removes padding by default


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"{ACTOR}.ulysses_sequence_parallel_size=${{no.such.key}}", "no.such.key"),
        (f"{ACTOR}.loss_agg_mode=mean", "Invalid loss_agg_mode: mean"),
        (f"~{ACTOR}.fsdp_config", "leave out the override that removes it"),
        (f"{ACTOR}.fsdp_config._target_=no.such.Class", "locating target 'no.such.Class'"),
    ],
)
def test_errors_of_verl_and_hydra_exit_with_code_2(override, said, runnable_overrides, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        engage_or_exit(compose_config(*runnable_overrides, FLAG, override), from_ours=True)
    assert raised.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "\n2. " not in printed


WRONG = ("prefix_grouper.verfy=first", f"{ACTOR}.fsdp_config.prefix_grouper=null")
TWO_PROBLEMS = (
    "2 problems in the configuration, nothing was started:",
    "did you mean ++prefix_grouper.verify=first?",
    f"2. {ACTOR}.fsdp_config.prefix_grouper is not set\n   why: the engine would ignore prefix_grouper",
)


@pytest.mark.parametrize(
    ("entry_point", "overrides", "code", "said"),
    [
        (main_ppo, WRONG, 2, TWO_PROBLEMS),
        (verls_main_ppo, (f"{QAT}.enable=True", f"{QAT}.mode=w4a4", "trainer.use_v1=False"), 2, [f"{QAT}.mode=w4a16"]),
        (verls_main_ppo, ("data.train_batch_size=0",), 1, ["train_batch_size (0) must be >="]),  # of verl itself
    ],
)
def test_entry_points_end_before_ray(
    entry_point, overrides, code, said, runnable_overrides, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(verls_main_ppo, "run_ppo", None)
    monkeypatch.setattr(sys, "argv", ["main_ppo", *runnable_overrides, FLAG, f"hydra.run.dir={tmp_path}", *overrides])
    with pytest.raises(SystemExit) as raised:
        entry_point.main()
    assert raised.value.code == code
    printed = capsys.readouterr().err
    assert all(text in printed for text in said)
    assert ("Traceback" in printed) == (code == 1)


def test_v0_runs_start_verls_own_task_runner(runnable_overrides, tmp_path, monkeypatch) -> None:
    """``tests/test_end_to_end.py`` starts the one of V1."""
    started = []
    monkeypatch.setattr(verls_main_ppo, "run_ppo", lambda config, task_runner_class: started.append(task_runner_class))
    given = *runnable_overrides, FLAG, "trainer.use_v1=False", f"hydra.run.dir={tmp_path}"
    monkeypatch.setattr(sys, "argv", ["main_ppo", *given])
    main_ppo.main()
    assert started == [TaskRunner]


ONE_LINE_OF_TRAINERS = """
import importlib, pkgutil, sys

sys.modules.update(dict.fromkeys({absent!r}))  # importing one fails
import verl.trainer.main_ppo
vars(verl.trainer.main_ppo).pop({runner!r}, None)
import verl_pg_plugin
from verl_pg_plugin import compat

for module in pkgutil.walk_packages(verl_pg_plugin.__path__, "verl_pg_plugin."):
    others = "attention.segment_sum rollout.kernels rollout.shared_decode rollout.replay_buffer engine.veomni"
    if not module.name.endswith(("__main__", *others.split())):  # of Triton, of vLLM, of V1 and of VeOmni
        importlib.import_module(module.name)
print([path for path in compat.problems() if "trainer" in path])
"""


def test_all_modules_import_without_v0_or_without_v1_trainers():
    without_v1 = {"absent": ("transfer_queue", "verl.trainer.ppo.v1"), "runner": "TaskRunnerV1"}
    without_v0 = {"absent": ("verl.trainer.main_ppo_v0",), "runner": ""}
    cases = [ONE_LINE_OF_TRAINERS.format(**absent) for absent in (without_v1, without_v0)]
    for ended in run_fresh([(code, {"VERL_PLATFORM": "cpu"}) for code in cases]):
        assert (ended.returncode, ended.stdout.split()) == (0, ["[]"]), ended.stderr


ENGINES = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")
PREFIX_CACHE = f"+{ACTOR}.fsdp_config.prefix_grouper.prefix_cache"


def test_one_flag_configures_all_engines_and_keeps_role_options(runnable_overrides) -> None:
    options = "+prefix_grouper.logits_chunk_size=64", "+critic.fsdp.prefix_grouper.prefix_cache=off"
    streamed = "data.train_batch_size=0"  # the fully async recipe has no batches of prompts; verl's checks are its own
    config = compose_stock(*runnable_overrides, FLAG, streamed, *options)
    assert mode_of(config) is mode_by_flags(True, config.critic.model.use_remove_padding) is Mode.PACKED
    engage(config)
    for engine in ENGINES:
        section = OmegaConf.select(config, engine)
        assert section._target_ == "verl_pg_plugin.config.PrefixGrouperEngineConfig"
        assert section.use_prefix_grouper is True
        options = section.prefix_grouper.logits_chunk_size, section.prefix_grouper.prefix_cache
        assert options == ((2048, "off") if engine == "critic.fsdp" else (64, "auto"))
    with pytest.raises(Exception, match="no_such_key"):  # struct mode is kept
        config.trainer.no_such_key = 1
    once = OmegaConf.to_yaml(config)
    engage(config)
    assert OmegaConf.to_yaml(config) == once, "engaging twice changes something"


LEFT_ALONE = (), ("actor_rollout_ref.model.use_remove_padding=False",), ("++prefix_grouper.prefix_cache=off",)


@pytest.mark.parametrize("flags", LEFT_ALONE, ids=["rmpad", "padded", "options"])
def test_runs_without_the_flag_are_unchanged(runnable_overrides, flags: tuple[str, ...], caplog) -> None:
    config = compose_stock(*runnable_overrides, *flags)
    before = OmegaConf.to_yaml(config)
    engage(config)
    assert OmegaConf.to_yaml(config) == before
    assert ("options of ++prefix_grouper have no effect" in caplog.text) == ("prefix_cache" in str(flags))


def test_non_booleans_other_engines_and_validation_inside_ray_are_refused(runnable_overrides, monkeypatch) -> None:
    overrides = f"{ACTOR}.use_prefix_grouper=no", f"{ACTOR}.strategy=megatron", "prefix_grouper.prefix_cache=never"
    for override in overrides:
        given = override.replace("prefix_grouper.prefix_cache", PREFIX_CACHE)
        with pytest.raises(ConfigError, match=override):
            engage(compose_stock(*runnable_overrides, FLAG, given))
    with pytest.raises(ConfigError, match="which only model_engine=dp sets"):
        engage(compose_stock(*runnable_overrides, FLAG, "model_engine=torchtitan", f"{ACTOR}.strategy=fsdp2"))
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"fsdp_config\._target_"):
        engage_or_exit(compose_stock(*runnable_overrides, FLAG))


@pytest.mark.parametrize(("mode", "strategy"), [*((mode, "fsdp2") for mode in Mode), (Mode.PACKED, "fsdp")])
def test_both_roles_follow_the_actor_flag(config_of, mode, strategy):
    settings = {"prefix_grouper.attention_kernel": "sdpa", "prefix_grouper.logits_chunk_size": 7}
    config = config_of({f"{ACTOR}.strategy": strategy, **settings}, mode)
    assert mode_of(config) is mode
    for role in (ACTOR, REF):
        engine_config = engine_configs(config, role)[0]
        assert isinstance(engine_config, PrefixGrouperEngineConfig)
        assert engine_config.use_prefix_grouper is FLAGS[mode][0]
        assert engine_config.prefix_grouper == PrefixGrouperOptions(attention_kernel="sdpa", logits_chunk_size=7)
        assert (engine_config.strategy, engine_config.forward_only) == (strategy, role == REF)


OF_ENGINE = {
    "dp": ("FSDPEngineConfig", ENGINES),
    "veomni": ("VeOmniEngineConfig", (f"{ACTOR}.veomni", f"{REF}.veomni")),
    "megatron": ("", ()),
}


@pytest.mark.parametrize("engine", OF_ENGINE)
def test_other_settings_and_engines_are_verls_own(engine: str) -> None:
    overrides = f"model_engine={engine}", "actor_rollout_ref.rollout.name=hf"
    config, stock = compose_config(*overrides), compose_stock(*overrides)
    assert mode_of(config) is Mode.RMPAD
    ours = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    options = ours.pop("prefix_grouper", None)
    stock_target, sections = OF_ENGINE[engine]
    for section in (OmegaConf.select(ours, name) for name in sections):
        assert [section.pop(name) for name in ("use_prefix_grouper", "prefix_grouper")] == [False, options]
        assert PrefixGrouperOptions() == instantiate(options), "the file and the class have the same defaults"
        section["_target_"] = f"verl.workers.config.{stock_target}"
    assert ours == OmegaConf.to_container(stock, resolve=True)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_foreign_engines_are_refused_and_subclasses_accepted(monkeypatch, strategy):
    """verl writes the strategy that its worker uses into the config after it was made."""
    look_up = EngineRegistry.get_engine_cls
    for base, accepted in ((PrefixGrouperFSDPEngineWithLMHead, True), (FSDPEngineWithLMHead, False)):
        engines = {strategy: type("Foreign", (base,), {"__module__": "somebody.elses"})}
        monkeypatch.setattr(
            EngineRegistry, "get_engine_cls", lambda kind, name, own=engines: own.get(name) or look_up(kind, name)
        )
        refused = pytest.raises(RuntimeError, match=rf"somebody\.elses\.Foreign for strategy {strategy} ")
        with nullcontext() if accepted else refused:
            PrefixGrouperEngineConfig(use_prefix_grouper=True)
