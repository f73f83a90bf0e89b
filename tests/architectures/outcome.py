"""Expected support of an architecture by packed mode, from configs and classes alone."""

import functools
from dataclasses import dataclass, field

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from tests.architectures.tiny_configs import tiny_config
from verl_pg_plugin import architectures, lm_head
from verl_pg_plugin.attention.kernels import KERNELS
from verl_pg_plugin.issue import Issue
from verl_pg_plugin.mixers import stateful_model_types
from verl_pg_plugin.mixers.attention import attention_needs
from verl_pg_plugin.mixers.layer_types import MAMBA2_MODEL_TYPES
from verl_pg_plugin.skeleton import auto_class, text_skeleton
from verl_pg_plugin.tested import COMPILED_TYPES

EXACT, REFUSED, NOT_RUN = "exact", "refused", "not run"
NOT_BUILT = {
    "dbrx": "transformers builds no model from its default config",
    "musicgen": "its config needs those of three other models",
    "musicgen_melody": "its config needs those of three other models",
}
HYBRIDS = stateful_model_types()
"""Tested by ``tests/mixers`` in float64: in any float32 gradients of their decays are 1e-5 off."""


@dataclass(frozen=True)
class Outcome:
    """A row of docs/models.md."""

    status: str
    why: str = ""  # reason if it is not exact, or its test if that is not the one for all types
    head_in_chunks: bool = False  # the head is the last module
    fused_kernels: bool = False  # verl's can replace it
    value_head: bool = False  # critics of this type run
    kernels: list[str] = field(default_factory=list)  # those that fit the head sizes of a released checkpoint
    needs: list[str] = field(default_factory=list)  # overrides that its default config requires
    compiled: bool = False  # by default


@functools.cache
def outcome_of(model_type: str) -> Outcome:
    """Return the outcome that the tests of a type must confirm."""
    if model_type in NOT_BUILT:
        return Outcome(NOT_RUN, NOT_BUILT[model_type])
    try:
        default = transformers.AutoConfig.for_model(model_type)
    except StrictDataclassError:
        return Outcome(NOT_RUN, "transformers refuses its default config")
    issues = functools.partial(architectures.architecture_issues, trust_remote_code=False)
    reasons = issues(default)
    if final := _final(reasons) or _final(issues(tiny_config(model_type))):
        return Outcome(REFUSED, "; ".join(reason.why for reason in final))
    # The default configs of GLM 4.5 and 4.5V lack the head size that their checkpoints have.
    sizes = {"glm4_moe": {"head_dim": 128}, "glm4v_moe": {"text_config": {"head_dim": 128}}}.get(model_type, {})
    released = transformers.AutoConfig.for_model(model_type, **sizes)
    needs = attention_needs(released.get_text_config())
    overrides = [reason.fix.rpartition(".override_config.")[2] for reason in reasons]
    if not supports_checkpointing(model_type):
        overrides.append("enable_gradient_checkpointing=False")
    module = text_skeleton(tiny_config(model_type))
    why = "by tests/mixers" if model_type in HYBRIDS else ""
    if model_type in MAMBA2_MODEL_TYPES:
        why += ", CPUs alone"
    return Outcome(
        EXACT,
        why,
        head_in_chunks=not lm_head.head_obstacle(module),
        fused_kernels=not lm_head.fused_obstacle(module),
        value_head=model_type in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
        and not issues(tiny_config(model_type), value_model=True),
        kernels=[name for name, spec in KERNELS.items() if not spec.unmet(needs)],
        needs=overrides,
        compiled=model_type in COMPILED_TYPES,
    )


def supports_checkpointing(model_type: str) -> bool:
    return model_class(transformers.AutoConfig.for_model(model_type)).supports_gradient_checkpointing


def model_class(config: PretrainedConfig) -> type[transformers.PreTrainedModel]:
    return auto_class(config)._model_mapping[type(config)]


def _final(reasons: list[Issue]) -> list[Issue]:
    return [reason for reason in reasons if not reason.fix]
