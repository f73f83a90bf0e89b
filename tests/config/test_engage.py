"""verl's own entry point with the plugin installed: the flag engages the mode or ends the run, never neither."""

from __future__ import annotations

import pytest
from config_support import compose_stock
from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.engage import engage, engage_or_exit
from verl_pg_plugin.config.mode import Mode, mode_by_flags, mode_of
from verl_pg_plugin.issue import ConfigError

ACTOR = "actor_rollout_ref.actor"
FLAG = (f"{ACTOR}.use_prefix_grouper=True",)  # verl removes padding by default
ENGINES = (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")


@pytest.fixture
def stock_config(runnable_overrides: list[str]):
    def composed(*overrides: str) -> DictConfig:
        return compose_stock(*runnable_overrides, *overrides)

    return composed


def test_one_flag_brings_the_engines_and_the_options_and_keeps_those_of_one_role(stock_config) -> None:
    config = stock_config(*FLAG, "+prefix_grouper.logits_chunk_size=64", "+critic.fsdp.prefix_grouper.carry=never")
    assert mode_of(config) is mode_by_flags(True, config.critic.model.use_remove_padding) is Mode.PACKED
    engage(config)
    for engine in ENGINES:
        section = OmegaConf.select(config, engine)
        assert section._target_ == "verl_pg_plugin.config.PrefixGrouperEngineConfig"
        assert section.use_prefix_grouper is True
        options = section.prefix_grouper.logits_chunk_size, section.prefix_grouper.carry
        assert options == ((2048, "never") if engine == "critic.fsdp" else (64, "auto"))
    with pytest.raises(Exception, match="no_such_key"):  # still closed to typing errors
        config.trainer.no_such_key = 1
    once = OmegaConf.to_yaml(config)
    engage(config)
    assert OmegaConf.to_yaml(config) == once, "engaging twice changes something"


@pytest.mark.parametrize("flags", [(), ("actor_rollout_ref.model.use_remove_padding=False",)], ids=["rmpad", "padded"])
def test_a_run_that_does_not_ask_is_left_alone(stock_config, flags: tuple[str, ...]) -> None:
    config = stock_config(*flags)
    before = OmegaConf.to_yaml(config)
    engage(config)
    assert OmegaConf.to_yaml(config) == before


def test_a_word_that_is_no_boolean_and_another_engine_are_refused(stock_config) -> None:
    for override in (f"{ACTOR}.use_prefix_grouper=no", f"{ACTOR}.strategy=megatron"):
        with pytest.raises(ConfigError, match=override):
            engage(stock_config(*FLAG, override))


def test_a_recipe_that_validates_inside_ray_is_told_that_the_flag_would_do_nothing(stock_config, monkeypatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"fsdp_config\._target_"):
        engage_or_exit(stock_config(*FLAG))
