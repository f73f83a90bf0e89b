"""Registration with verl: in every import order, light, idempotent, and an error if it is missing."""

import importlib
import json
import sys
from unittest.mock import Mock

import pytest
from verl.workers.engine import EngineRegistry

from tests.fresh import Ended, run_fresh
from verl_pg_plugin.after_import import after_import
from verl_pg_plugin.config import PrefixGrouperEngineConfig
from verl_pg_plugin.engine import registration
from verl_pg_plugin.engine.registration import PrefixGrouperFSDPEngineWithLMHead

STOCK, OURS = "verl.workers.engine.fsdp.transformer_impl", "PrefixGrouperFSDPEngineWithLMHead"
CPU, NVIDIA, NO_PLUGINS = {"VERL_PLATFORM": "cpu"}, {"VERL_PLATFORM": "nvidia"}, {"VERL_USE_EXTERNAL_PLUGINS": "none"}

BUILT = """
from verl.workers.engine import EngineRegistry
print(EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
"""
SELECT_THE_MODE = f"""
import verl
from hydra.utils import instantiate
instantiate({{"_target_": "verl_pg_plugin.config.PrefixGrouperEngineConfig", "use_prefix_grouper": True}})
{BUILT}
"""
IMPORT_VERL = f"""
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
import torch
import verl
{BUILT}
print(EngineRegistry._engines["language_model"]["fsdp"]["cuda"].__module__)
print(torch.cuda.is_initialized(), sorted({{"flash_attn", "vllm"}} & set(sys.modules)))
"""
# Before a config selects the mode, verl's entry point checks the flag, and its trainers keep groups.
FIRST_IMPORT = """
import verl_pg_plugin.{module}
import verl.utils.config
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import PPOTrainerSync

assert verl.utils.config.validate_config.wrapped_by_verl_pg_plugin
print(all(cls._balance_batch.wrapped_by_verl_pg_plugin for cls in (PPOTrainerSync, RayPPOTrainer)))
"""
ROLLOUT = "from verl.workers.rollout.base import get_rollout_class\nprint(get_rollout_class('hf').__name__)"
FIRST_MODULES = ("config.rules", "trainer", "cpu.rollout")

SILENCE_ROOT_LOGGER = """
import logging, sys
logging.basicConfig(level="ERROR"); logging.root.handlers[0].setLevel("ERROR")
sys.modules["model_hosting_container_standards.logging_config"] = logging
"""
LOG = """
logging.getLogger("verl_pg_plugin.engine.engine").warning("a level")
logging.getLogger("verl_pg_plugin.trainer.groups").info("tokens not computed")
logging.root.handlers[0].setLevel("WARNING"); logging.getLogger("verl_pg_plugin.engine.engine").warning("once")
"""
SIZE = """
import json, resource, sys
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import verl
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([after - before, sorted(sys.modules)]))
"""
BROKEN = "import sys\nsys.modules['verl_pg_plugin.engine.engine'] = None\n"
FLAG_SET = "import sys; sys.argv.append('actor_rollout_ref.actor.use_prefix_grouper=true')\n"
HOOKS_BROKEN = "sys.modules['verl_pg_plugin.cpu'] = None\nimport verl"
FIRST = {module: FIRST_IMPORT.format(module=module) + SELECT_THE_MODE + ROLLOUT for module in FIRST_MODULES}
FIRST["trainer"] = SILENCE_ROOT_LOGGER + FIRST["trainer"] + LOG
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "verl first": (IMPORT_VERL, CPU),
    # Then verl's entry point skips the loaded package.
    "package first": ("import importlib.util, verl_pg_plugin; importlib.util.find_spec('verl')" + BUILT, CPU),
    "registration first": ("import verl_pg_plugin.engine.registration" + BUILT, CPU),
    "external module": (BUILT, CPU | NO_PLUGINS | {"VERL_USE_EXTERNAL_MODULES": "verl_pg_plugin"}),
    "broken": (BROKEN + SELECT_THE_MODE, NVIDIA),
    "broken hooks, the flag set": (FLAG_SET + HOOKS_BROKEN, NVIDIA),
    "stock": (SIZE, NO_PLUGINS | NVIDIA),
    "the flag off": (SIZE, NVIDIA),
    "no plugins, the mode selected": (SELECT_THE_MODE, NO_PLUGINS | NVIDIA),
    **{module: (code, CPU) for module, code in FIRST.items()},
}


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    """Every case in an interpreter that has imported neither verl nor the plugin."""
    return dict(zip(CASES, run_fresh(list(CASES.values())), strict=True))


def test_without_the_flag_the_plugin_takes_20_mib_and_prints_nothing(ended: dict[str, Ended]) -> None:
    """The number of modules replaces the import time, which depends on the machine."""
    stock, ours = ended["stock"], ended["the flag off"]
    (stock_kib, stock_modules), (kib, modules) = (json.loads(result.stdout) for result in (stock, ours))
    assert "verl_pg_plugin" in modules, ours.stderr
    assert kib - stock_kib <= 20 * 2**10
    assert len(set(modules) - set(stock_modules)) <= 30
    assert (ours.stderr, stock.stderr) == ("", "")


def test_importing_verl_registers_without_cuda_kernels_or_vllm_and_logs_one_line(ended: dict[str, Ended]) -> None:
    result = ended["verl first"]
    assert result.stdout.splitlines() == [OURS, STOCK, "False []"], result.stderr
    assert sum(line.startswith("verl_pg_plugin ") for line in result.stderr.splitlines()) == 1


def test_logs_appear_once_although_vllm_silences_the_root_logger(ended: dict[str, Ended]) -> None:
    lines = ended["trainer"].stderr.splitlines()
    assert [line.rpartition(":")[2] for line in lines[-3:]] == ["a level", "tokens not computed", "once"], lines


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        *((case, [OURS]) for case in ("package first", "registration first", "external module")),
        ("no plugins, the mode selected", [OURS]),
        *((module, ["True", OURS, "ServerAdapter"]) for module in FIRST_MODULES),
    ],
)
def test_engines_are_registered_in_every_import_order(ended, case: str, expected: list[str]) -> None:
    assert ended[case].stdout.split() == expected, ended[case].stderr
    assert "not registered" not in ended[case].stderr


def test_after_import_leaves_the_finders_of_other_threads_in_place(monkeypatch) -> None:
    seen: list[list[object]] = []
    calls: list[None] = []
    finder = Mock(**{"find_spec.side_effect": lambda *_: seen.append([*sys.meta_path])})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    after_import("colorsys", lambda: calls.append(None))
    before = [*sys.meta_path]
    importlib.reload(importlib.import_module("colorsys"))
    assert (calls, sys.meta_path, seen) == ([None], before, [before] * 2)


def test_registering_again_changes_nothing_and_keeps_engines_of_other_devices() -> None:
    before = {model: dict(entries) for model, entries in EngineRegistry._engines.items()}
    registration.register_engines()
    assert {model: dict(entries) for model, entries in EngineRegistry._engines.items()} == before
    entries = EngineRegistry._engines["language_model"]["fsdp2"]
    assert entries["cuda", "nvidia"] is PrefixGrouperFSDPEngineWithLMHead
    assert entries["cuda"].__module__ == entries["npu"].__module__ == STOCK


def test_a_broken_plugin_is_an_error_only_if_a_config_selects_the_mode(ended: dict[str, Ended]) -> None:
    """verl logs a plugin that fails to load at DEBUG."""
    assert ended["broken"].returncode != 0
    assert "import of verl_pg_plugin.engine.engine halted" in ended["broken"].stderr
    assert ended["broken hooks, the flag set"].returncode == 2
    assert "use_prefix_grouper=true: engines are not registered (" in ended["broken hooks, the flag set"].stderr


def test_the_mode_is_refused_if_verl_would_build_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "npu")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "huawei")
    PrefixGrouperEngineConfig(strategy="fsdp2", use_prefix_grouper=False)
    with pytest.raises(RuntimeError, match=r"silently share nothing.*VERL_ENGINE_DEVICE"):
        PrefixGrouperEngineConfig(strategy="fsdp2", use_prefix_grouper=True)
