"""The parts of verl that the CPU default, its platform and its rollout, is built on; see ``contract.verl``."""

from __future__ import annotations

from verl_pg_plugin.contract.table import EXISTS, VERL_VERSION, Part, parts_of

__all__ = ["VERL_CPU_PARTS"]


def _parts(owner: str, used_by: str, /, **signatures: str) -> tuple[Part, ...]:
    return parts_of(owner, used_by, VERL_VERSION, **signatures)


VERL_CPU_PARTS: tuple[Part, ...] = (
    *_parts("verl.plugin.platform", "cli/doctor/fresh_process.py", get_platform="()"),
    *_parts("verl.plugin.platform.platform_manager", "cpu/platform.py", PlatformRegistry=EXISTS),
    *_parts("verl.plugin.platform.platform_manager.PlatformRegistry", "cpu/platform.py", register="(platform)"),
    *_parts("verl.plugin.platform.platform_base", "cpu/platform.py", PlatformBase=EXISTS),
    *_parts(
        "verl.plugin.platform.platform_base.PlatformBase",
        "cpu/platform.py",
        **dict.fromkeys(("device_name", "vendor_name", "device_module"), EXISTS),
        **dict.fromkeys(
            (
                *("is_available", "current_device", "device_count", "empty_cache", "communication_backend_name"),
                *("visible_devices_envvar", "profiler_start", "profiler_stop", "ray_resource_name"),
                *("ray_noset_envvars", "is_ipc_supported", "cudart"),
            ),
            "(self)",
        ),
        is_platform_available="(self, use_smi_check=False)",
        set_device="(self, device_index)",
        synchronize="(self, device_index=None)",
        manual_seed="(self, seed)",
        manual_seed_all="(self, seed)",
        set_allocator_settings="(self, settings)",
        get_device_capability="(self, device_index=0)",
        nvtx_range="(self, msg)",
    ),
    *_parts(
        "verl.workers.rollout.base", "cpu/__init__.py cpu/rollout.py", BaseRollout=EXISTS, _ROLLOUT_REGISTRY=EXISTS
    ),
    *_parts(
        "verl.workers.rollout.base.BaseRollout",
        "cpu/rollout.py",
        __init__="(self, config, model_config, device_mesh, *args, **kwargs)",
        resume="(self, tags)",
        release="(self)",
        update_weights="(self, weights, wire_format='named_tensors', **kwargs)",
    ),
    *_parts(
        "verl.workers.rollout.replica",
        "cpu/__init__.py cpu/rollout.py cpu/server.py",
        RolloutReplica=EXISTS,
        RolloutReplicaRegistry=EXISTS,
        TokenOutput="(token_ids, log_probs, stop_reason, num_preempted, extra_fields, ...)",
    ),
    *_parts(
        "verl.workers.rollout.replica.RolloutReplica",
        "cpu/rollout.py",
        __init__=(
            "(self, replica_rank, config, model_config, gpus_per_node=8, is_reward_model=False, "
            "is_teacher_model=False, name_suffix='')"
        ),
        launch_servers="(self)",
        max_concurrency=EXISTS,
    ),
    *_parts("verl.utils.dataset.rl_dataset", "cpu/picture_dataset.py", RLHFDataset=EXISTS),
    *_parts(
        "verl.utils.dataset.rl_dataset.RLHFDataset",
        "cpu/picture_dataset.py",
        _process_multi_modal_info="(messages, image_patch_size, config)",
    ),
    *_parts("verl.workers.rollout.replica.RolloutReplicaRegistry", "cpu/__init__.py", register="(name, loader)"),
    *_parts("verl.checkpoint_engine.base", "cpu/weight_store.py", CheckpointEngine=EXISTS),
    *_parts("verl.checkpoint_engine.base", "cpu/weight_store.py", CheckpointEngineRegistry=EXISTS),
    *_parts("verl.checkpoint_engine.base.CheckpointEngineRegistry", "cpu/weight_store.py", register="(backend)"),
    *_parts(
        "verl.checkpoint_engine.base.CheckpointEngine",
        "cpu/weight_store.py",
        prepare="(self)",
        build_topology="(actor_wg_world_size, rollout_world_size, metadata)",
        init_process_group="(self, **kwargs)",
        send_weights="(self, weights, global_steps=None)",
        receive_weights="(self, global_steps=None)",
        finalize="(self)",
    ),
    *_parts("verl", "cpu/agent_loop_v0.py", DataProto=EXISTS),
    *_parts("verl.utils.ray_utils", "cpu/agent_loop_v0.py", auto_await="(func)"),
    *_parts("verl.experimental.agent_loop", "cpu/agent_loop_v0.py", AgentLoopManager=EXISTS, AgentLoopWorker=EXISTS),
    *_parts(
        "verl.experimental.agent_loop.AgentLoopManager",
        "cpu/agent_loop_v0.py",
        __init__="(self, config, ...)",
        create="(*args, **kwargs)",
        generate_sequences="(self, prompts)",
    ),
    *_parts(
        "verl.experimental.agent_loop.AgentLoopWorker",
        "cpu/agent_loop_v0.py",
        _run_agent_loop="(self, sampling_params, trajectory, agent_name, ...)",
    ),
    *_parts("verl.workers.rollout.utils", "cpu/rollout.py", ensure_async_iterator="(iterable)"),
)
