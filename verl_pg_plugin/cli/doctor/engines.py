"""Whether verl finds the plugin, and which engines it would build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_pg_plugin import register
from verl_pg_plugin.cli.doctor.report import Problem, Section

__all__ = ["FreshProcess", "engines", "fresh_process", "plugins", "registration_error"]

NAME = "verl_pg_plugin"
SCRIPT = Path(__file__).with_name("fresh_process.py")
TIMEOUT_S = 300


@dataclass(frozen=True)
class FreshProcess:
    """What ``fresh_process.py`` found.

    Attributes:
        error: why verl itself could not be imported, the last line of stderr; the other fields are then empty.
        engines: per model type and strategy, the class that verl would build.
        plugins: entry points of the group ``verl.plugins``.
        platform, device, vendor: verl's platform, e.g. PlatformCUDA, cuda, nvidia.
        available: whether the platform finds its device.
    """

    error: str = ""
    engines: tuple[dict[str, Any], ...] = field(default=())
    plugins: tuple[dict[str, Any], ...] = field(default=())
    platform: str = ""
    device: str = ""
    vendor: str = ""
    available: bool = False

    @property
    def ours(self) -> dict[str, Any] | None:
        """This plugin's entry point, None if it is not installed."""
        return next((plugin for plugin in self.plugins if plugin["name"] == NAME), None)

    @property
    def loads(self) -> bool:
        """Whether this package can be imported beside verl."""
        return not self.error and not (self.ours and self.ours["error"])


def fresh_process() -> FreshProcess:
    """Import verl in a new process of this environment, as verl's workers do."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.read_text()]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return FreshProcess(error=f"it takes more than {TIMEOUT_S} s")
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        return FreshProcess(error=lines[-1] if lines else f"the process ended with {result.returncode}")  # a signal
    seen = json.loads(result.stdout.strip().splitlines()[-1])
    return FreshProcess(
        engines=tuple(seen.pop("engines")),
        plugins=tuple(seen.pop("plugins")),
        **seen,
    )


def registration_error() -> str:
    """Why this process could not register our engines, empty if it could.

    It imported this package before verl, as ``main_ppo`` does; another plugin is then earlier than in a fresh process.
    """
    try:
        register()
    except Exception as error:  # whatever it is, the import of this package has only logged it
        return f"{type(error).__name__}: {error}"
    return ""


def plugins(process: FreshProcess, here: str = "") -> Section:
    """The platform that verl takes and the plugins that it loads; ``here`` is this process' registration error."""
    if process.error:
        problem = Problem(f"import verl fails: {process.error}", _import_fix(process.error))
        return Section("verl", (("import verl", process.error),), (problem,))
    problems = [_platform_problem(process)] if not process.available else []
    rows = [("platform", f"{process.platform}, device {process.device}, vendor {process.vendor}")]
    if process.ours is None:
        rows.append((f"plugin {NAME}", "not installed"))
        problems.append(
            Problem(
                "verl finds no entry point verl_pg_plugin in the group verl.plugins: the package is not installed here",
                f"{sys.executable} -m pip install <folder of this repository>",
            )
        )
    for plugin in process.plugins:
        state = "loads" if plugin["allowed"] else "excluded by VERL_USE_EXTERNAL_PLUGINS"
        rows.append((f"plugin {plugin['name']}", plugin["error"] or state))
        problems += _plugin_problems(plugin)
    if here:
        rows.append((f"{NAME} imported before verl", here))
        problems.append(_registration_problem(here))
    return Section("verl", tuple(rows), tuple(problems))


def _import_fix(error: str) -> str:
    if "Unknown platform" in error and os.environ.get("VERL_PLATFORM"):
        return (
            "unset VERL_PLATFORM, or export VERL_PLATFORM=cpu to run without a GPU (registered by this plugin: install "
            "it, and keep VERL_USE_EXTERNAL_PLUGINS from excluding it)"
        )
    return f"correct what it names; {sys.executable} -c 'import verl.workers.engine' shows where it happens"


def _platform_problem(process: FreshProcess) -> Problem:
    return Problem(
        f"verl takes {process.platform} and finds no {process.device} device",
        "export VERL_PLATFORM=cpu to run without a GPU, or repair the driver until nvidia-smi lists one",
    )


def _registration_problem(error: str) -> Problem:
    return Problem(
        f"{NAME} cannot register its engines, and verl goes on without: {error}",
        f"correct what it names; {sys.executable} -c 'import {NAME}; {NAME}.register()' shows where it happens",
    )


def _plugin_problems(plugin: dict[str, Any]) -> list[Problem]:
    if plugin["error"] and plugin["name"] == NAME:
        return [_registration_problem(plugin["error"])]
    if plugin["error"]:
        return [
            Problem(
                f"verl cannot load the plugin {plugin['name']} and says so at DEBUG only: {plugin['error']}",
                f"correct what it names; {sys.executable} -c 'import verl, {plugin['value']}' shows where it happens",
                is_warning=True,
            )
        ]
    if not plugin["allowed"] and plugin["name"] == NAME:
        policy = os.environ["VERL_USE_EXTERNAL_PLUGINS"]
        return [
            Problem(
                f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading {NAME}",
                f"unset VERL_USE_EXTERNAL_PLUGINS, or name {NAME} in it",
            )
        ]
    return []


def engines(process: FreshProcess) -> Section:
    """The engine class that verl would build, and why."""
    key = f"device {os.environ.get('VERL_ENGINE_DEVICE') or process.device}"
    key += f", vendor {os.environ.get('VERL_ENGINE_VENDOR') or process.vendor}"
    rows, others = [], []
    for engine in process.engines:
        ours = engine["built"].startswith(f"{NAME}.")
        why = "ours" if ours else engine["error"] or "not ours: nothing would be shared"
        rows.append((engine["model_type"], engine["strategy"], engine["built"].rpartition(".")[2], f"{why} ({key})"))
        if not ours:
            others.append(f"{engine['model_type']}/{engine['strategy']}")
    problems = []
    # A plugin that is missing, excluded or broken is a problem of its own.
    if others and process.ours and process.ours["allowed"] and not process.ours["error"]:
        overridden = [name for name in ("VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR") if os.environ.get(name)]
        problems.append(
            Problem(
                f"verl would not build our engine for {', '.join(others)} ({key})",
                f"unset {' '.join(overridden)}"
                if overridden
                else "run on an NVIDIA GPU, or export VERL_PLATFORM=cpu; our engines are registered for those",
            )
        )
    return Section("Engines", tuple(rows), tuple(problems))
