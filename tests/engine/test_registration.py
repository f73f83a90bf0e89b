"""The plugin is found, light, idempotent, and noticed when it is not in force."""

import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from verl.workers.engine import EngineRegistry

from tests.support import make_engine, save_tiny_model
from verl_pg_plugin.config import PrefixGrouperEngineConfig
from verl_pg_plugin.engine import registration
from verl_pg_plugin.engine.fsdp_engine import PrefixGrouperFSDPEngineWithLMHead

STOCK = "verl.workers.engine.fsdp.transformer_impl"


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_verl_finds_the_plugin() -> None:
    (found,) = entry_points(group="verl.plugins", name="verl_pg_plugin")
    assert found.load().__name__ == "verl_pg_plugin"


def test_importing_verl_registers_without_cuda_kernels_or_vllm_and_logs_one_line() -> None:
    result = python(
        """
        import logging, sys
        logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
        import torch
        import verl
        from verl.workers.engine import EngineRegistry
        print(EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
        print(EngineRegistry._engines["language_model"]["fsdp"]["cuda"].__module__)
        flash_attn_2 = "verl_pg_plugin.attention.kernels.flash_attn_2"
        print(torch.cuda.is_initialized(), sorted({flash_attn_2, "vllm"} & set(sys.modules)))
        """,
        VERL_PLATFORM="cpu",
    )
    assert result.stdout.splitlines() == ["PrefixGrouperFSDPEngineWithLMHead", STOCK, "False []"], result.stderr
    assert sum(line.startswith("verl_pg_plugin ") for line in result.stderr.splitlines()) == 1


BUILT = """
    from verl.workers.engine import EngineRegistry
    print(EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
"""


@pytest.mark.parametrize(
    ("first", "environment"),
    [
        # Then verl's entry point finds the package loaded and runs nothing.
        ("import importlib.util, verl_pg_plugin; importlib.util.find_spec('verl')", {}),
        ("import verl_pg_plugin", {"VERL_USE_EXTERNAL_PLUGINS": "none"}),
        ("", {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "verl_pg_plugin"}),
    ],
    ids=["before-verl", "before-verl-without-plugins", "external-module"],
)
def test_engines_are_registered_whoever_imports_the_package_first(first: str, environment: dict[str, str]) -> None:
    result = python(first + textwrap.dedent(BUILT), VERL_PLATFORM="cpu", **environment)
    assert result.stdout.split() == ["PrefixGrouperFSDPEngineWithLMHead"], result.stderr


FIRST_IMPORTS = (
    "config.engine_config",
    "config.rules",
    "attention.ulysses",
    "engine.heads.lm_head",
    "trainer",
    "cpu.agent_loop",
)


@pytest.mark.parametrize("module", FIRST_IMPORTS)
def test_whichever_module_imports_verl_first_the_mode_engages_without_a_warning(module: str) -> None:
    """Before the mode is asked for, verl's entry point knows the flag, and its task runner our trainers."""
    first = f"""
        import verl_pg_plugin.{module}
        import verl.utils.config
        from verl.trainer.ppo.v1 import get_trainer_cls

        assert verl.utils.config.validate_config.calls_before
        print(get_trainer_cls("pg_sync").__name__)
    """
    rollout = "from verl.workers.rollout.base import get_rollout_class\nprint(get_rollout_class('hf').__name__)"
    result = python(textwrap.dedent(first) + textwrap.dedent(SELECT_THE_MODE) + rollout, VERL_PLATFORM="cpu")
    engine, rollout = "PrefixGrouperFSDPEngineWithLMHead", "ServerAdapter"
    assert result.stdout.split() == ["GroupPPOTrainerSync", engine, rollout], result.stderr
    assert "not registered" not in result.stderr


def test_on_cuda_ours_wins_and_the_stock_entry_is_untouched() -> None:
    entries = EngineRegistry._engines["language_model"]["fsdp2"]
    assert entries["cuda", "nvidia"] is PrefixGrouperFSDPEngineWithLMHead
    assert entries["cuda"].__module__ == STOCK
    assert entries["npu"].__module__ == STOCK


def test_registering_twice_changes_nothing() -> None:
    before = {model: dict(entries) for model, entries in EngineRegistry._engines.items()}
    registration.register_engines()
    assert {model: dict(entries) for model, entries in EngineRegistry._engines.items()} == before


def test_a_second_plugin_on_the_same_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherEngine(PrefixGrouperFSDPEngineWithLMHead):
        pass

    monkeypatch.setitem(EngineRegistry._engines["language_model"]["fsdp"], ("cuda", "nvidia"), OtherEngine)
    with pytest.raises(RuntimeError, match=r"OtherEngine is already registered.*VERL_USE_EXTERNAL_PLUGINS"):
        registration.register_engines()


def test_asking_for_the_mode_is_an_error_when_verl_would_build_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "npu")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "huawei")
    PrefixGrouperEngineConfig(strategy="fsdp2", use_prefix_grouper=False)
    with pytest.raises(RuntimeError, match=r"silently share nothing.*VERL_ENGINE_DEVICE"):
        PrefixGrouperEngineConfig(strategy="fsdp2", use_prefix_grouper=True)


SELECT_THE_MODE = """
    import verl
    from hydra.utils import instantiate
    from verl.workers.engine import EngineRegistry
    instantiate({"_target_": "verl_pg_plugin.config.PrefixGrouperEngineConfig", "use_prefix_grouper": True})
    print(EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
"""


def test_a_broken_plugin_is_silent_in_verl_but_not_when_the_mode_is_asked_for() -> None:
    """verl logs a plugin that fails to load at DEBUG; the config that selects the mode raises its error."""
    broken = "import sys\nsys.modules['verl_pg_plugin.engine.fsdp_engine'] = None\n"
    result = python(broken + textwrap.dedent(SELECT_THE_MODE), VERL_PLATFORM="nvidia")
    assert result.returncode != 0
    assert "import of verl_pg_plugin.engine.fsdp_engine halted" in result.stderr


def test_selecting_the_mode_registers_even_where_verl_was_told_to_load_no_plugins() -> None:
    result = python(SELECT_THE_MODE, VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM="nvidia")
    assert result.stdout.split() == ["PrefixGrouperFSDPEngineWithLMHead"], result.stderr


def test_engine_checks_at_init_that_it_is_in_force(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process_group: None
) -> None:
    path = save_tiny_model(tmp_path)
    monkeypatch.setattr(PrefixGrouperEngineConfig, "__post_init__", lambda config: None)
    monkeypatch.setattr(EngineRegistry, "get_engine_cls", lambda *_: object)
    with pytest.raises(RuntimeError, match="silently share nothing"):
        make_engine(path, packed=True, engine_cls=PrefixGrouperFSDPEngineWithLMHead)
