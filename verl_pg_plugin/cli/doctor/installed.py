"""What is installed, told from metadata alone: the plugin's entry point, and packages of attention kernels."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points

from verl_pg_plugin.attention.kernels import KERNELS
from verl_pg_plugin.cli.doctor.report import Problem, Section

__all__ = ["kernels", "plugin"]

NAME = "verl_pg_plugin"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"


def plugin() -> Section:
    """Whether verl will find this plugin, and is allowed to load it."""
    others = [entry.name for entry in entry_points(group="verl.plugins") if entry.name != NAME]
    rows = [(f"plugin {name}", "installed") for name in others]
    problems = []
    if not entry_points(group="verl.plugins", name=NAME):
        rows.insert(0, (f"plugin {NAME}", "not installed"))
        problems.append(
            Problem(
                f"verl finds no entry point {NAME} in the group verl.plugins: the package is not installed here",
                f"{sys.executable} -m pip install <folder of this repository>",
            )
        )
    elif is_excluded():
        rows.insert(0, (f"plugin {NAME}", f"excluded by {POLICY}"))
        problems.append(
            Problem(
                f"{POLICY}={os.environ[POLICY]} keeps verl from loading {NAME}", f"unset {POLICY}, or name {NAME} in it"
            )
        )
    else:
        rows.insert(0, (f"plugin {NAME}", "installed; doctor --full loads it as a worker of verl does"))
    return Section("verl", tuple(rows), tuple(problems))


def is_excluded() -> bool:
    """Whether verl is told not to load this plugin."""
    policy = os.environ.get(POLICY, "auto").strip().lower()
    return policy != "auto" and NAME not in [name.strip() for name in policy.split(",")]


def kernels() -> Section:
    """Packages of the attention kernels; which one a GPU runs, ``--full`` tells."""
    rows = [
        (name, "comes with torch" if not spec.package else "installed" if spec.installed else f"not: {spec.install}")
        for name, spec in KERNELS.items()
    ]
    return Section("Attention kernels", tuple(rows))
