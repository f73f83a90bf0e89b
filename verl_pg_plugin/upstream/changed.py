"""The error of a patch that no longer fits, and how patches tell."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class UpstreamChangedError(RuntimeError):
    """A patched function no longer looks as it did in the versions the patch names."""


def check_parameters(function: Callable[..., Any], name: str, parameters: list[str]) -> None:
    """Pass where a function that is about to be replaced still takes what its replacement does.

    Raises:
        UpstreamChangedError: it takes others; ``name`` is its dotted path.
    """
    if list(inspect.signature(function).parameters) != parameters:
        raise UpstreamChangedError(
            f"{name} now takes {inspect.signature(function)}; the plugin needs verl>=0.9.0,<0.10"
        )
