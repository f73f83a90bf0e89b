"""Tested versions of verl, transformers and torch, and the names of theirs that this package depends on.

The package overrides, patches or privately reads these names. A change in one of them would fail late or silently, so
``doctor --full`` checks them. Imported public names need no check: they fail on import.
"""

import inspect
import pkgutil
from collections.abc import Container
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Any

from packaging.requirements import Requirement

_FSDP = "verl.workers.engine.fsdp.transformer_impl"
_VEOMNI = "verl.workers.engine.veomni.transformer_impl"
_ROUTER = "verl.utils.veomni.router_replay.VeOmniRouterReplay"
_BALANCER = "verl.workers.rollout.router.RequestLoadBalancer"
_LAYERS = "transformers.models"

SIGNATURES = {
    # overridden or called
    f"{_FSDP}.FSDPEngine.__init__": "model_config engine_config optimizer_config checkpoint_config",
    f"{_FSDP}.FSDPEngine._build_module": "",
    f"{_FSDP}.FSDPEngine._build_fsdp_module": "module",
    f"{_FSDP}.FSDPEngine._gradient_sync_context": "is_last_micro_batch",
    f"{_FSDP}.FSDPEngine.forward_backward_batch": "data loss_function forward_only",
    f"{_VEOMNI}.VeOmniEngine.__init__": "model_config engine_config optimizer_config checkpoint_config",
    f"{_VEOMNI}.VeOmniEngine.initialize": "",
    f"{_VEOMNI}.VeOmniEngine._maybe_apply_async_activation_offload": "module",
    f"{_VEOMNI}.VeOmniEngine._build_model_optimizer": "",
    f"{_VEOMNI}.VeOmniEngine.forward_backward_batch": "data loss_function forward_only",
    f"{_ROUTER}.install": "model",
    f"{_ROUTER}.begin_microbatch": "targets",
    **{f"{_ROUTER}.{name}": "" for name in ("begin_record", "begin_replay", "take_recorded", "clear")},
    "verl.single_controller.base.worker.Worker._query_dispatch_info": "mesh_name",
    "verl.utils.dataset.rl_dataset.RLHFDataset._process_multi_modal_info": "messages image_patch_size config",
    f"{_LAYERS}.qwen3.modeling_qwen3.Qwen3Attention.forward": "hidden_states position_embeddings attention_mask",
    f"{_LAYERS}.qwen3.modeling_qwen3.Qwen3ForCausalLM.forward": "input_ids attention_mask past_key_values|cache labels",
    f"{_LAYERS}.llama.modeling_llama.LlamaAttention.forward": "hidden_states position_embeddings attention_mask",
    f"{_LAYERS}.llama.modeling_llama.LlamaDecoderLayer.__init__": "config layer_idx",
    f"{_LAYERS}.llama.modeling_llama.LlamaDecoderLayer.forward": "hidden_states past_key_values|cache",
    # implemented, see rollout/router.py
    f"{_BALANCER}.acquire_server": "request_id",
    f"{_BALANCER}.release_server": "server_id request_id",
    f"{_BALANCER}.add_servers": "servers",
    f"{_BALANCER}.remove_servers": "server_ids",
    **{f"{_BALANCER}.{name}": "" for name in ("require_acquire_fields", "require_release_fields")},
    **{f"{_BALANCER}.{name}": "" for name in ("get_all_servers", "get_status", "get_total_inflight")},
    f"{_BALANCER}.clear_sticky_cache": "",
    "verl.workers.rollout.router.get_router_handle": "servers router_config_path",
    # patched, see upstream.py
    "verl.utils.config.validate_config": "config use_reference_policy use_critic",
    "verl.trainer.main_ppo.run_ppo": "config task_runner_class",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._balance_batch": "batch metrics logging_prefix",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor": "batch metrics",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_old_log_prob": "batch metrics",
    "verl.trainer.ppo.ray_trainer.RayPPOTrainer._balance_batch": "batch metrics logging_prefix",
    "verl.trainer.ppo.ray_trainer.RayPPOTrainer._update_actor": "batch",
    "verl.trainer.ppo.ray_trainer.RayPPOTrainer._compute_old_log_prob": "batch",
    "verl.utils.model.load_valuehead_model": "local_path torch_dtype model_config trust_remote_code",
    f"{_FSDP}.apply_monkey_patch": "model use_remove_padding ulysses_sp_size",
    f"{_FSDP}.enable_activation_offloading": "model strategy enable_ckpt",
    f"{_FSDP}.CPUOffloadPolicy": "pin_memory",
    "verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu": "model",
    "verl.utils.distributed.initialize_global_process_group_ray": "timeout_second backend",
}
"""Parameter names that a function must have besides ``self``; | separates alternatives."""

_PRIVATE = (
    "verl.workers.engine.base.EngineRegistry._engines",
    "verl.workers.rollout.base._ROLLOUT_REGISTRY",
    *(f"{_ROUTER}.{name}" for name in ("action", "num_fired", "num_targets")),
    "transformers.PretrainedConfig._attn_implementation",
    "transformers.PreTrainedModel._no_split_modules",
    "transformers.PreTrainedModel._supports_attention_backend",
    # decides where it checkpoints, see engine/compiled_layers.py
    "transformers.modeling_layers.GradientCheckpointingLayer.__call__|__init_subclass__",
    "torch._C._dynamo.eval_frame._set_lru_cache",
    "torch._dynamo.config._make_closure_patcher",
    "torch.nn.modules.dropout._DropoutNd",
    "torch.ops.aten._flash_attention_forward",
    "torch.ops.aten._flash_attention_backward",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
)
"""Names that must exist; a class must define them itself."""

_DELTA_NET = "causal_conv1d_fn chunk_gated_delta_rule|torch_chunk_gated_delta_rule"  # replaced with shared prefixes
_MAMBA2 = (  # read by our forward of these layers
    "A_log D act chunk_size conv1d conv_dim conv_kernel_size dt_bias head_dim in_proj intermediate_size n_groups norm "
    "num_heads out_proj ssm_state_size time_step_limit"
)
_NAMES_WITHIN = {
    f"{_FSDP}.FSDPEngine.__init__": "model_config engine_config rank pad_to_length pad_to_length_bucket "
    "compute_entropy_from_logits scaler _autocast_dtype _is_lora _uses_fsdp2_cpu_offload_policy",
    f"{_FSDP}.FSDPEngine._init_device_mesh": "device_mesh ulysses_parallel_group ulysses_sequence_parallel_size",
    f"{_FSDP}.FSDPEngine._build_fsdp_module": "scaler _autocast_dtype _uses_fsdp2_cpu_offload_policy",
    f"{_FSDP}.FSDPEngine._build_model_optimizer": "module",
    "verl.single_controller.base.worker_group.WorkerGroup.__init__": "_dispatch_info",
    "transformers.PreTrainedModel._set_gradient_checkpointing": "_gradient_checkpointing_func",
    f"{_LAYERS}.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet.forward": _DELTA_NET,
    f"{_LAYERS}.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet.forward": _DELTA_NET,
    f"{_LAYERS}.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet.forward": _DELTA_NET,
    f"{_LAYERS}.bamba.modeling_bamba.BambaMixer.__init__": _MAMBA2,
    f"{_LAYERS}.falcon_h1.modeling_falcon_h1.FalconH1Mixer.__init__": f"{_MAMBA2} mamba_rms_norm ssm_in_multiplier",
    f"{_LAYERS}.granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridMambaLayer.__init__": _MAMBA2,
    f"{_LAYERS}.nemotron_h.modeling_nemotron_h.NemotronHMamba2Mixer.__init__": _MAMBA2,
    f"{_VEOMNI}.VeOmniEngine.__init__": "model_config engine_config rank pad_to_length pad_to_length_bucket "
    "compute_entropy_from_logits ulysses_parallel_group ulysses_sequence_parallel_size _is_lora "
    "_uses_fsdp2_cpu_offload_policy _router_replay _router_replay_mode",
    f"{_VEOMNI}.VeOmniEngine._build_model_optimizer": "module",
    "torch.nn.Module.register_buffer": "_buffers",
}
"""Attributes or globals that the body of a function must use; | separates alternatives."""

_OPTIONAL = {
    "verl.trainer.ppo.v1.": "verl.trainer.ppo.v1",
    "verl.trainer.ppo.ray_trainer.": "verl.trainer.ppo.ray_trainer",
    "verl.workers.rollout.router.": "cachetools",
    _VEOMNI: "veomni",
    _ROUTER: "veomni",
}
"""Prefixes of names that are checked only if a module is installed; the plugin runs without these modules."""

NAMES = (*(SIGNATURES | _NAMES_WITHIN), *_PRIVATE)
"""Names that ``problems`` checks."""


@cache
def requirements(extra: str = "") -> dict[str, Requirement]:
    """Return the requirements of this package and of an extra by name; {} if the package is not installed."""
    try:
        declared = [Requirement(line) for line in requires("verl-pg-plugin") or ()]
    except PackageNotFoundError:
        return {}
    by_name: dict[str, Requirement] = {}
    for requirement in declared:
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            if requirement.name in by_name:
                requirement.specifier &= by_name[requirement.name].specifier
            requirement.marker = None
            by_name[requirement.name] = requirement
    return by_name


def untested() -> list[str]:
    """Return a message for each of verl, transformers and torch with an untested version."""
    messages = []
    for name in ("verl", "transformers", "torch"):
        tested, current = requirements("tested").get(name), installed(name)
        if tested and current and not tested.specifier.contains(current, prereleases=True):
            messages.append(f"{name} {current} is outside the tested range {tested.specifier}")
    return messages


def installed(package: str) -> str | None:
    """Return the version of a package, or None without metadata, for example a source tree on the path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def problems() -> list[str]:
    """Return a message, with the version to install, for each name that the installed packages lack or changed."""
    messages = []
    for path in NAMES:
        if any(path.startswith(prefix) and find_spec(module) is None for prefix, module in _OPTIONAL.items()):
            continue
        if why := _problem(path):
            package = path.partition(".")[0]
            tested = requirements("tested").get(package, package)
            messages.append(f"{package} {installed(package)}: {path} {why}; pip install '{tested}'")
    return messages


def _problem(path: str) -> str:
    owner_path, _, name = path.rpartition(".")
    try:
        owner: Any = pkgutil.resolve_name(owner_path)
        if path in _NAMES_WITHIN:
            used = inspect.unwrap(getattr(owner, name)).__code__.co_names
            if missing := _missing(_NAMES_WITHIN[path], used):
                return f"does not use {missing}"
        if path not in _PRIVATE:
            return difference(owner, name, SIGNATURES.get(path, ""))
    except (AttributeError, ImportError) as error:
        return f"is gone ({error})"
    has_name = vars(owner).__contains__ if inspect.isclass(owner) else partial(hasattr, owner)
    return "" if any(map(has_name, name.split("|"))) else "is gone or inherited"


def difference(owner: Any, name: str, wanted: str, *, exactly: bool = False) -> str:
    """Return how a function's parameters differ from ``wanted``, or ''. Unless ``exactly``, it may have more."""
    function: Any = getattr(owner, name, None)
    try:
        taken = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # not callable, or built in
        return "is gone" if function is None else "has no readable signature"
    if exactly and taken != wanted.split():
        return f"takes ({', '.join(taken)}), not exactly ({', '.join(wanted.split())})"
    missing = _missing(wanted, taken)
    return f"takes ({', '.join(taken)}), without {missing}" if missing else ""


def _missing(wanted: str, names: Container[str]) -> str:
    return ", ".join(choice for choice in wanted.split() if not any(name in names for name in choice.split("|")))
