"""Training without a GPU: verl's platform ``cpu`` and the rollout ``hf``."""

from functools import partial
from pkgutil import resolve_name

from verl_pg_plugin.cpu.device import selected


def register() -> None:
    """Register the rollout ``hf`` if the platform ``cpu`` is selected; its module loads on first use."""
    if not selected():
        return
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_pg_plugin import upstream
    from verl_pg_plugin.after_import import after_import

    RolloutReplicaRegistry.register("hf", partial(resolve_name, "verl_pg_plugin.cpu.rollout.HFReplica"))
    _ROLLOUT_REGISTRY[("hf", "async")] = "verl_pg_plugin.cpu.rollout.ServerAdapter"
    after_import("transformers.models.auto.processing_auto", _register_processor)
    upstream.use_single_gloo_backend()
    after_import("verl.workers.engine", upstream.use_unpinned_offload)
    after_import("verl.utils.fsdp_utils", upstream.copy_saved_weights)


def _register_processor() -> None:
    """Make ``AutoProcessor`` use our class for Qwen3-VL checkpoints that name no processor class."""
    import transformers

    from verl_pg_plugin.cpu.images import Qwen3VLProcessor

    transformers.AutoProcessor.register(transformers.Qwen3VLConfig, Qwen3VLProcessor, exist_ok=True)


# On import: a process may import this package before verl's plugin loader runs.
register()
