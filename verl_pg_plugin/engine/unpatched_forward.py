"""Models whose forward is transformers' own while verl builds them."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from verl_pg_plugin import upstream
from verl_pg_plugin.mixers import stateful_model_types
from verl_pg_plugin.modalities import Modality


@contextmanager
def unpatched_forward(engine: Any, modality: Modality) -> Iterator[None]:
    """Keep verl from replacing the model's forward: its own drops keywords, ours among them.

    Args:
        engine: one of verl's; its ``model_config`` is another one inside.
        modality: what the model reads.
    """
    asked = engine.model_config
    engine.model_config = copy.copy(asked)
    object.__setattr__(engine.model_config, "use_fused_kernels", False)  # verl's configs are frozen
    replaced = asked.hf_config.model_type in stateful_model_types() or modality.replaced_by_verl
    try:
        with upstream.forwards_left_alone() if replaced else nullcontext():
            yield
    finally:
        engine.model_config = asked
