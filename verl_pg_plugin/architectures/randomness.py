"""What a model draws at random in training, by its config: dropout and the jitter of routers."""

from __future__ import annotations

import re

from transformers import PretrainedConfig

from verl_pg_plugin.reason import Reason

__all__ = ["random_reasons"]

_RANDOM = re.compile(r"drop|jitter")
_OTHER_HEADS = re.compile(r"^(classifier|summary)_|^encoder_")
"""Fields of heads that are not built (verl sets those of a value model to 0), and of encoders."""


def random_reasons(config: PretrainedConfig) -> list[Reason]:
    """One for every field of a text config that asks for randomness.

    Dropout that is a module would be found in the built model; functional dropout (``residual_dropout`` of Starcoder2,
    ``dropout`` of OPT) is told by the config alone.
    """
    return [
        Reason(
            f"the model's config says {name}={value}: a shared prefix would draw its random numbers once for all "
            "responses",
            fix=f"++actor_rollout_ref.model.override_config.{name}=0.0",
            field=(name, value),
        )
        for name, value in config.to_dict().items()
        if _RANDOM.search(name) and not _OTHER_HEADS.search(name) and _is_positive(value)
    ]


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
