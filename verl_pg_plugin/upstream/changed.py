"""The error of a patch that no longer fits, and how patches tell."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SUPPORTED = "the plugin needs verl>=0.9.0,<0.10"


class UpstreamChangedError(RuntimeError):
    """What a patch is about to replace is gone, or no longer looks as it did in the versions the patch names."""


@contextmanager
def names_of_verl() -> Iterator[None]:
    """Wraps the imports and look-ups of the names that a patch replaces.

    Raises:
        UpstreamChangedError: a module has no such name any more, there is no such module, or importing it failed for
            want of something that is not verl's.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "verl":
            raise UpstreamChangedError(f"{error}; {SUPPORTED}") from error
        why = f"{type(error).__name__}: {error}"
        raise UpstreamChangedError(f"verl cannot be imported here: {why}; install or repair what it names") from error
    except AttributeError as error:
        raise UpstreamChangedError(f"{error}; {SUPPORTED}") from error


def check_parameters(function: Callable[..., Any], name: str, parameters: list[str]) -> None:
    """Pass where a function that is about to be replaced still takes what its replacement does.

    Raises:
        UpstreamChangedError: it takes others; ``name`` is its dotted path.
    """
    if list(inspect.signature(function).parameters) != parameters:
        raise UpstreamChangedError(f"{name} now takes {inspect.signature(function)}; {SUPPORTED}")
