"""The names of verl, transformers and torch that this package overrides, patches or reads although they are private.

What is merely imported needs no check: it fails by name. These fail later, or change what runs without a word.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib.metadata import requires, version
from typing import Any

from packaging.requirements import Requirement

__all__ = ["NUM_NAMES", "problems"]

_FSDP = "verl.workers.engine.fsdp.transformer_impl"
_LAYERS = "transformers.models"
_ENGINE_STEPS = {
    "forward_step": "micro_batch loss_function forward_only",
    "prepare_model_inputs": "micro_batch",
    "prepare_model_outputs": "output output_args micro_batch",
}

_FUNCTIONS = {
    # overridden
    f"{_FSDP}.FSDPEngine.__init__": "model_config engine_config optimizer_config checkpoint_config",
    f"{_FSDP}.FSDPEngine.initialize": "",
    f"{_FSDP}.FSDPEngine._build_module": "",
    f"{_FSDP}.FSDPEngine._build_lora_module": "module",
    f"{_FSDP}.FSDPEngine._build_fsdp_module": "module",
    f"{_FSDP}.FSDPEngine.forward_backward_batch": "data loss_function forward_only",
    f"{_FSDP}.FSDPEngine.optimizer_step": "",
    **{f"{_FSDP}.FSDPEngineWithLMHead.{name}": takes for name, takes in _ENGINE_STEPS.items()},
    **{f"{_FSDP}.FSDPEngineWithValueHead.{name}": takes for name, takes in _ENGINE_STEPS.items()},
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._balance_batch": "batch metrics logging_prefix keep_minibatch",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor": "batch metrics",
    "verl.utils.dataset.rl_dataset.RLHFDataset._process_multi_modal_info": "messages image_patch_size config",
    f"{_LAYERS}.qwen3.modeling_qwen3.Qwen3Attention.forward": "hidden_states position_embeddings past_key_values",
    f"{_LAYERS}.qwen3.modeling_qwen3.Qwen3ForCausalLM.forward": "input_ids attention_mask past_key_values labels",
    f"{_LAYERS}.llama.modeling_llama.LlamaAttention.forward": "hidden_states position_embeddings past_key_values",
    f"{_LAYERS}.llama.modeling_llama.LlamaDecoderLayer.__init__": "config layer_idx",
    # patched, see upstream.py
    "verl.utils.config.validate_config": "config use_reference_policy use_critic",
    "verl.trainer.main_ppo.run_ppo": "config task_runner_class",
    "verl.trainer.ppo.v1.get_trainer_cls": "name",
    "verl.trainer.ppo.ray_trainer.RayPPOTrainer._balance_batch": "batch metrics logging_prefix keep_minibatch",
    "verl.utils.model.load_valuehead_model": "local_path torch_dtype model_config trust_remote_code",
    f"{_FSDP}.apply_monkey_patch": "model use_remove_padding ulysses_sp_size",
    f"{_FSDP}.enable_activation_offloading": "model strategy enable_ckpt",
    f"{_FSDP}.CPUOffloadPolicy": "pin_memory",
    "verl.utils.distributed.initialize_global_process_group_ray": "timeout_second backend",
}
"""Parameters, beside ``self``, that a function must take under these names."""

_PRIVATE = (
    "verl.workers.engine.base.EngineRegistry._engines",
    "verl.workers.rollout.base._ROLLOUT_REGISTRY",
    "transformers.PretrainedConfig._attn_implementation",
    "transformers.PreTrainedModel._no_split_modules",
    "transformers.PreTrainedModel._supports_attention_backend",
    "transformers.modeling_layers.GradientCheckpointingLayer.__call__",  # where it checkpoints; see compiled layers
    "torch._C._dynamo.eval_frame._set_lru_cache",
    "torch.nn.modules.dropout._DropoutNd",
)
"""Names that must be there, in a class as its own."""

_SET_BY_LAYERS = {
    f"{_LAYERS}.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet": "causal_conv1d_fn chunk_gated_delta_rule",
    f"{_LAYERS}.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet": "causal_conv1d_fn chunk_gated_delta_rule",
}
"""Attributes that layers must set in their constructors, since Gated DeltaNet over shared prefixes replaces them."""

NUM_NAMES = len(_FUNCTIONS) + len(_PRIVATE) + len(_SET_BY_LAYERS)
"""How many names ``problems`` looks at."""


def problems() -> list[str]:
    """One sentence for every name that is gone or has changed in the installed versions, with what to install."""
    found = []
    for path in (*_FUNCTIONS, *_PRIVATE, *_SET_BY_LAYERS):
        package = path.partition(".")[0]
        if why := _problem(path):
            found.append(f"{package} {version(package)}: {path} {why}; pip install '{_supported(package)}'")
    return found


def _problem(path: str) -> str:
    try:
        owner: Any = pkgutil.resolve_name(path.rpartition(".")[0])
        there: Any = pkgutil.resolve_name(path)
    except (AttributeError, ImportError) as error:
        return f"is gone ({error})"
    if path in _PRIVATE:
        return "is not its own" if inspect.isclass(owner) and path.rpartition(".")[2] not in vars(owner) else ""
    if path in _SET_BY_LAYERS:
        missing = [name for name in _SET_BY_LAYERS[path].split() if name not in there.__init__.__code__.co_names]
        return f"does not set {', '.join(missing)}" if missing else ""
    taken = inspect.signature(there).parameters
    missing = [name for name in _FUNCTIONS[path].split() if name not in taken]
    return f"takes ({', '.join(taken)}), without {', '.join(missing)}" if missing else ""


def _supported(package: str) -> str:
    return next(str(r) for r in map(Requirement, requires("verl_pg_plugin") or ()) if r.name == package)
