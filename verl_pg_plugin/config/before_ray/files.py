"""Are the files and functions there that the config names: rewards, tools, a checkpoint, folders to write to?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from symtable import symtable

from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.before_ray.reading import is_remote, wrong
from verl_pg_plugin.config.keys import ROLLOUT
from verl_pg_plugin.config.violation import Violation

__all__ = ["file_violations"]

OBJECTS = {
    "reward.custom_reward_function.path": "reward.custom_reward_function.name",
    "data.custom_cls.path": "data.custom_cls.name",
    "trainer.v1.sampler.custom_sampler.path": "trainer.v1.sampler.custom_sampler.name",
}
"""Key of a Python file, and of the name that verl takes from it."""
AGENT_LOOPS = f"{ROLLOUT}.agent.agent_loop_config_path"
FILES = (
    f"{ROLLOUT}.multi_turn.function_tool_path",
    f"{ROLLOUT}.multi_turn.tool_config_path",
    f"{ROLLOUT}.multi_turn.interaction_config_path",
    AGENT_LOOPS,
)
DUMPS = {"trainer.rollout_data_dir": "", "trainer.validation_data_dir": ""}
"""Folders that verl makes and writes to after the first rollouts, and what our trainers make in each."""
RESUME_MODE, RESUME_FROM = "trainer.resume_mode", "trainer.resume_from_path"


def file_violations(config: DictConfig) -> Iterator[Violation]:
    """Paths that lead nowhere on this machine, and names that a Python file does not define."""
    for key in (*OBJECTS, *FILES):
        path = OmegaConf.select(config, key)
        if not path or is_remote(str(path)):  # pkg:// is a module, and imported where it is needed
            continue
        if not (_found(path) if key == AGENT_LOOPS else Path(path).is_file()):
            yield wrong(config, "file", key, "no such file", f"{key}=<file>")
        elif key in OBJECTS and (missing := _missing_name(config, key, OBJECTS[key])):
            yield missing
    for key, ours in DUMPS.items():
        path = OmegaConf.select(config, key)
        if path and (obstacle := _unwritable(Path(str(path))) or _unwritable(Path(str(path), ours))):
            yield wrong(config, "folder", key, obstacle, f"{key}=<folder>")
    if OmegaConf.select(config, RESUME_MODE) == "resume_path":
        path = OmegaConf.select(config, RESUME_FROM)
        if not isinstance(path, str) or "global_step_" not in path or not (is_remote(path) or Path(path).is_dir()):
            why = f"{RESUME_MODE}=resume_path wants a folder named global_step_<number>, and this is none"
            fix = f"{RESUME_FROM}=<folder>/global_step_<number>, or {RESUME_MODE}=auto"
            yield wrong(config, "resume", (RESUME_FROM, RESUME_MODE), why, fix)


def _unwritable(folder: Path) -> str:
    """Why nothing can be written to a folder that need not be there yet; empty if it can."""
    # os.path, for which a folder that cannot be searched holds nothing; a link that leads nowhere is no folder.
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def _found(path: str) -> bool:
    """Whether verl finds the file, which it looks for beside its own package as well."""
    from verl.experimental.agent_loop.utils import resolve_config_path  # seconds of imports, for the runs that need it

    try:
        return Path(resolve_config_path(path)).is_file()
    except FileNotFoundError:
        return False


def _missing_name(config: DictConfig, key: str, name_key: str) -> Violation | None:
    """Read from the file's symbols: to import it is the run's affair."""
    path, name = str(OmegaConf.select(config, key)), str(OmegaConf.select(config, name_key))
    source = Path(path).read_text(encoding="utf-8")
    try:
        table = symtable(source, path, "exec")
    except SyntaxError as error:
        return wrong(config, "file", key, f"is no Python: {error.msg} in line {error.lineno}", f"repair {path}")
    defined = [symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()]
    if name in defined or "import *" in source:
        return None
    why = f"{path} does not define {name}; it defines {', '.join(defined) or 'nothing'}"
    return wrong(config, "file", (name_key, key), why, f"{name_key}=<one of these>")
