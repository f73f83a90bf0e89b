"""Other people's code in the places that this plugin builds on: who put it there, and whose runs.

A package that serves ``actor.use_prefix_grouper`` as well (versatile-ai/PrefixSharing is one) replaces methods of the
very classes that our engines derive from. Where ours replace such a method, ours runs in the modes that share prefixes
and theirs in the others; everywhere else theirs runs in all modes, and nobody has tested the two together.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.workers.engine.base import EngineRegistry

from verl_pg_plugin.config.keys import FSDP_STRATEGIES
from verl_pg_plugin.contract.verl import PARTS

__all__ = ["Replacement", "edited_files", "installed_peers", "replacements", "say_once"]

logger = logging.getLogger(__name__)

PEERS = {"prefix_sharing": "versatile-ai/PrefixSharing"}
"""Packages that are known to serve the same flag: name to import, and where they come from."""

BEYOND_SUSPICION = {"verl_pg_plugin", "torch", "ray", "transformers", "tensordict", "hydra", "omegaconf", "tqdm"}
"""Packages whose decorators verl and transformers use, and our own; the standard library is among them too."""

MODEL_TYPES = ("language_model", "value_model")
REPLACED_WHERE_SHARED = ("prepare_model_inputs", "prepare_model_outputs")
"""Methods of verl's engines that ours do not call where prefixes are shared; what else they override they extend."""


@dataclass(frozen=True)
class Replacement:
    """A part of verl or transformers that another package has replaced in this process.

    Attributes:
        path: dotted path of the part.
        module: where the code that stands there now was defined.
        in_force: whose code runs, in words.
    """

    path: str
    module: str
    in_force: str

    def __str__(self) -> str:
        return f"{self.path} is {self.module}'s (in force: {self.in_force})"


def replacements() -> list[Replacement]:
    """Parts that neither their own package nor one that it decorates with has written, one entry for each function.

    What is missing of them altogether is the contract's to report.
    """
    found: dict[int, Replacement] = {}
    for part in PARTS:
        try:
            there = pkgutil.resolve_name(part.path)
        except (AttributeError, ImportError):
            continue
        module = _foreign_module(there, part.path.partition(".")[0])
        if module and id(there) not in found:  # a class that inherits the function has an entry in the table too
            found[id(there)] = Replacement(part.path, module, _in_force(part.path))
    return list(found.values())


def installed_peers() -> list[str]:
    """Installed packages that are known to serve the same flag, whether or not they have replaced anything."""
    return [f"{name} ({origin})" for name, origin in PEERS.items() if find_spec(name) is not None]


def edited_files() -> list[str]:
    """Files of the installed verl that hold parts we build on and are not what its release installed.

    A source checkout has no list to compare with: all of its files are somebody's own, and none is named.
    """
    recorded = {
        Path(str(file.locate())): file.hash for file in distribution("verl").files or () if file.hash is not None
    }
    modules = {_module_of(part.path) for part in PARTS if part.path.startswith("verl.")}
    files = {Path(file) for name in modules if (file := getattr(sys.modules.get(name), "__file__", None))}
    return sorted(str(file) for file in files & recorded.keys() if _hash(file) != recorded[file].value)


@functools.cache
def say_once() -> None:
    """Log, once in a process, what another package has replaced."""
    found = replacements()
    if found:
        logger.warning(
            "verl_pg_plugin: another package has replaced parts that prefix sharing builds on: %s. Uninstall it or keep"
            " it from loading, or let ++prefix_grouper.verify=first compare with rows computed alone",
            "; ".join(map(str, found)),
        )


def _foreign_module(there: Any, package: str) -> str:
    """Module of the outermost layer that is not the package's; empty if all layers may be."""
    allowed = {package, *BEYOND_SUSPICION, *sys.stdlib_module_names}
    return next((module for module in _modules(there) if module.partition(".")[0] not in allowed), "")


def _modules(layer: Any) -> Iterator[str]:
    """Where each layer of a decorated function was written, from outside in; a class is one layer."""
    if isinstance(layer, type):
        yield layer.__module__
        return
    while layer is not None:
        function = getattr(layer, "__func__", layer)
        # A decorator copies __module__ and cannot copy the globals.
        if (names := getattr(function, "__globals__", None)) is not None:
            yield names.get("__name__", "")
        layer = getattr(function, "__wrapped__", None)


def _in_force(path: str) -> str:
    """Whose code runs where another package stands at ``path``."""
    owner_path, _, name = path.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_path)
    except (AttributeError, ImportError):
        owner = None
    engines = [EngineRegistry.get_engine_cls(kind, strategy) for kind in MODEL_TYPES for strategy in FSDP_STRATEGIES]
    derived = [engine for engine in engines if isinstance(owner, type) and issubclass(engine, owner)]
    ours = [next(_modules(getattr(engine, name)), "").startswith("verl_pg_plugin.") for engine in derived]
    if not ours or not all(ours):
        return "theirs, in every mode"
    if name in REPLACED_WHERE_SHARED:
        return "ours where prefixes are shared, theirs in other modes"
    return "theirs, in every mode, called by ours where prefixes are shared"


def _module_of(path: str) -> str:
    """The module that a part is in: the longest beginning of its path that has been imported."""
    while path and path not in sys.modules:
        path = path.rpartition(".")[0]
    return path


def _hash(file: Path) -> str:
    """As a wheel's RECORD writes it."""
    return base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
