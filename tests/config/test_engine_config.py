"""Configs compose from the command line and become the dataclasses that verl's workers build, in all modes."""

from __future__ import annotations

import pytest
from config_support import FLAGS, compose_config, compose_stock
from hydra.utils import instantiate
from omegaconf import OmegaConf
from test_rules import engine_configs
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_pg_plugin.config import Mode, PrefixGrouperEngineConfig, PrefixGrouperOptions, mode_of
from verl_pg_plugin.engine.registration import PrefixGrouperFSDPEngineWithLMHead

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("mode", list(Mode))
def test_both_roles_follow_the_actor_flag(make_config, mode, strategy):
    settings = {"prefix_grouper.attention_kernel": "sdpa", "prefix_grouper.logits_chunk_size": 7}
    config = make_config(mode, {f"{ACTOR}.strategy": strategy, **settings})
    assert mode_of(config) is mode
    for role in (ACTOR, REF):
        engine_config = engine_configs(config, role)[0]
        assert isinstance(engine_config, PrefixGrouperEngineConfig)
        assert engine_config.use_prefix_grouper is FLAGS[mode][0]
        assert engine_config.prefix_grouper == PrefixGrouperOptions(attention_kernel="sdpa", logits_chunk_size=7)
        assert (engine_config.strategy, engine_config.forward_only) == (strategy, role == REF)


@pytest.mark.parametrize(
    ("engine", "stock_target"), [("dp", "FSDPEngineConfig"), ("veomni", "VeOmniEngineConfig")], ids=["dp", "veomni"]
)
def test_every_other_setting_is_verls_own(engine: str, stock_target: str) -> None:
    overrides = f"model_engine={engine}", "actor_rollout_ref.rollout.name=hf"
    config = compose_config(*overrides)
    assert mode_of(config) is Mode.RMPAD
    ours = OmegaConf.to_container(config, resolve=True)
    stock = OmegaConf.to_container(compose_stock(*overrides), resolve=True)
    options = ours.pop("prefix_grouper")
    assert PrefixGrouperOptions() == instantiate(options), "the file and the class have the same defaults"
    roles, of_fsdp = ours["actor_rollout_ref"], engine == "dp"
    sections = [roles[role]["fsdp_config" if of_fsdp else "veomni"] for role in ("actor", "ref")]
    for section in [*sections, *([ours["critic"]["fsdp"]] if of_fsdp else [])]:
        assert [section.pop(name) for name in ("use_prefix_grouper", "prefix_grouper")] == [False, options]
        section["_target_"] = f"verl.workers.config.{stock_target}"
    assert ours == stock


@pytest.mark.parametrize("engine", ["megatron", "torchtitan"])
def test_other_engines_of_verl_keep_their_config(engine):
    config = compose_config(f"model_engine={engine}", "actor_rollout_ref.rollout.name=hf")
    assert "fsdp_config" not in config.actor_rollout_ref.actor
    assert mode_of(config) is Mode.RMPAD


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_foreign_engine_of_either_strategy_is_noticed_and_one_derived_from_ours_is_not(monkeypatch, strategy):
    """verl writes the strategy that its worker looks up into the config after it was made."""
    look_up = EngineRegistry.get_engine_cls
    for base, taken in ((PrefixGrouperFSDPEngineWithLMHead, True), (FSDPEngineWithLMHead, False)):
        foreign = type("Foreign", (base,), {"__module__": "somebody.elses"})
        monkeypatch.setattr(
            EngineRegistry,
            "get_engine_cls",
            lambda kind, asked, foreign=foreign: foreign if asked == strategy else look_up(kind, asked),
        )
        if taken:
            PrefixGrouperEngineConfig(use_prefix_grouper=True)
        else:
            with pytest.raises(RuntimeError, match=rf"somebody\.elses\.Foreign for strategy {strategy} "):
                PrefixGrouperEngineConfig(use_prefix_grouper=True)
