"""What verl's own validation says, which verl asks after the others and which stops at its first objection."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Collection, Iterator
from contextlib import redirect_stdout

from hydra.errors import InstantiationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import validate_config

from verl_pg_plugin.config.facts import runs_critic
from verl_pg_plugin.config.violation import Violation

__all__ = ["USER_ERRORS", "verls_objection"]

USER_ERRORS = (ValueError, AssertionError, InstantiationException, OmegaConfBaseException, TypeError, ArithmeticError)
"""What verl's validation and its config dataclasses raise for a wrong override."""
WITHOUT_WORDS = (InstantiationException, OmegaConfBaseException, TypeError, ArithmeticError)


def verls_objection(config: DictConfig, said: Collection[str]) -> Iterator[Violation]:
    """The error that verl's validation of this config ends with, if it does.

    Args:
        config: the composed trainer config.
        said: keys that were found wrong before. With any, an error that names one of them is not repeated, and one that
            verl has no words for, such as a sum of a number and a word, is taken for their consequence.
    """
    validate = inspect.unwrap(validate_config)  # without the hook through which verl's entry point asks us
    try:
        with redirect_stdout(io.StringIO()):  # it says that all is well
            validate(config=config, use_reference_policy=need_reference_policy(config), use_critic=runs_critic(config))
    except USER_ERRORS as error:
        message = " ".join(str(error).split())
        if said and isinstance(error, WITHOUT_WORDS):
            return
        leaves = [re.escape(key.rpartition(".")[2]) for key in said]
        if not any(re.search(rf"\b{leaf}\b", message) for leaf in leaves):
            yield Violation("verl", (), f"verl's own validation refuses it: {message}", "change what it names")
