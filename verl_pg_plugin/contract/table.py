"""Compare parts of other packages with what our code was written for."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

__all__ = ["EXISTS", "VERL_VERSION", "Part", "differences", "parts_of", "signature_of"]

VERL_VERSION = "0.9.1"
"""Release whose parts the tables of verl list."""

EXISTS = ""
"""Signature of a part of which only the existence counts: a registry, a base class, a constant, a property."""


@dataclass(frozen=True)
class Part:
    """One name of another package.

    Attributes:
        path: dotted path.
        signature: parameters without annotations, such as ``(data, dp_group=None)``; one that ends in ``, ...)`` lists
            the parameters that must be among those there are, whatever their defaults; ``EXISTS`` for none.
        used_by: files of ours that depend on it, relative to this package.
        checked_against: version whose part our code was written for.
        needs: package without which the part cannot be imported; it is not looked at where that is missing.
    """

    path: str
    signature: str
    used_by: tuple[str, ...]
    checked_against: str
    needs: str = ""

    def mismatch(self, signature: str) -> str:
        """How a signature, as ``signature_of`` writes it, differs from what our code was written for; empty if not."""
        if not self.signature.endswith(", ...)"):
            return "" if self.signature in (EXISTS, signature) else f"takes {signature} instead of {self.signature}"
        there = {name.partition("=")[0].lstrip("*") for name in signature[1:-1].split(", ")}
        wanted = self.signature.removeprefix("(").removesuffix(", ...)").split(", ")
        gone = [name for name in wanted if name not in there]
        return f"no longer takes {', '.join(gone)}" if gone else ""


def signature_of(found: Any) -> str:
    """Parameters and defaults without annotations; ``EXISTS`` for what cannot be called."""
    if not callable(found):
        return EXISTS
    signature = inspect.signature(found)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def differences(parts: Iterable[Part]) -> list[str]:
    """One readable message for every part that is missing or has another signature than the table says."""
    return [message for part in parts if (message := _difference(part))]


def _difference(part: Part) -> str:
    if part.needs and find_spec(part.needs) is None:
        return ""
    package = part.path.partition(".")[0]
    here, then = f"{package} {version(package)}", f"{package} {part.checked_against}"
    users = ", ".join(part.used_by)
    try:
        found = pkgutil.resolve_name(part.path)
    except (AttributeError, ImportError) as error:
        return f"{part.path} is gone from {here}, {then} had it ({error}); needed by {users}"
    if part.signature == EXISTS:
        return ""
    mismatch = part.mismatch(signature_of(found))
    return mismatch and f"{part.path} {mismatch} in {here}, we know {then}; needed by {users}"


def parts_of(owner: str, used_by: str, checked_against: str, /, needs: str = "", **signatures: str) -> tuple[Part, ...]:
    """Parts of one module or class: ``name=signature``; ``used_by`` names files, separated by blanks."""
    files = tuple(used_by.split())
    return tuple(
        Part(f"{owner}.{name}", signature, files, checked_against, needs) for name, signature in signatures.items()
    )
