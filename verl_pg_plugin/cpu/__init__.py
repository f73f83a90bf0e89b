"""The embedded default for machines without a GPU: verl's platform ``cpu`` and the rollout ``hf``."""

from __future__ import annotations

from verl_pg_plugin.cpu.platform import CPUPlatform, selected

__all__ = ["ROLLOUT_NAME", "CPUPlatform", "register", "selected"]

ROLLOUT_NAME = "hf"


def register() -> None:
    """Enter rollout ``hf`` in verl's registries beside the platform ``cpu``; calling it again changes nothing.

    Both entries are dormant until they are asked for by name (``VERL_PLATFORM=cpu`` and
    ``actor_rollout_ref.rollout.name=hf``), so a machine with GPUs behaves as if they were not there. Only
    names are entered: the rollout's own module, and transformers' model classes with it, load on first use.
    """
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(ROLLOUT_NAME, _load_replica)
    _ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "verl_pg_plugin.cpu.rollout.ServerAdapter"
    if selected():
        from verl_pg_plugin import upstream

        upstream.use_single_gloo_backend()
        upstream.use_unpinned_offload()


def _load_replica() -> type:
    from verl_pg_plugin.cpu.rollout import HFReplica

    return HFReplica
