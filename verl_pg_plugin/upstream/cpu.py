"""What keeps verl's workers from starting on the platform ``cpu``."""

from __future__ import annotations

import inspect

from verl_pg_plugin.upstream.changed import UpstreamChangedError


def use_single_gloo_backend() -> None:
    """Let verl's workers start a process group on the platform ``cpu``.

    What: the default of ``backend`` in ``verl.utils.distributed.initialize_global_process_group_ray`` becomes
    ``"cpu:gloo"``. The default is set on the function object, so modules that imported it by name see it too.
    Why: verl builds ``cpu:gloo,<device>:<backend>``; with device ``cpu`` that names one device twice, which
    torch refuses.
    Versions: verl 0.9.1, torch 2.11 to 2.13. Only called when ``VERL_PLATFORM=cpu``.
    Remove when: verl leaves the second pair out for device ``cpu``.

    Raises:
        UpstreamChangedError: the function's parameters are not ``(timeout_second=None, backend=None)``.
    """
    from verl.utils.distributed import initialize_global_process_group_ray as patched

    defaults = {name: parameter.default for name, parameter in inspect.signature(patched).parameters.items()}
    if defaults == {"timeout_second": None, "backend": "cpu:gloo"}:
        return
    if defaults != {"timeout_second": None, "backend": None}:
        raise UpstreamChangedError(
            f"verl.utils.distributed.initialize_global_process_group_ray now takes {defaults}; the cpu platform "
            "needs verl>=0.9.1,<0.10"
        )
    patched.__defaults__ = (None, "cpu:gloo")


def use_unpinned_offload() -> None:
    """Let the FSDP2 reference model load where there is no accelerator to pin memory for.

    What: ``CPUOffloadPolicy`` in ``verl.workers.engine.fsdp.transformer_impl`` builds a policy without pinning.
    Why: verl gives forward-only FSDP2 models ``CPUOffloadPolicy(pin_memory=True)``; pinning asks for an
    accelerator and fails with "Cannot access accelerator device when none is available".
    Versions: verl 0.9.1, torch 2.11 to 2.13. Only called when ``VERL_PLATFORM=cpu``.
    Remove when: verl leaves offloading, or pinning, out for device ``cpu``.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    def unpinned(pin_memory: bool = False) -> CPUOffloadPolicy:
        return CPUOffloadPolicy(pin_memory=False)

    if not hasattr(transformer_impl, "CPUOffloadPolicy"):
        raise UpstreamChangedError(
            "verl.workers.engine.fsdp.transformer_impl no longer uses CPUOffloadPolicy; the cpu platform needs "
            "verl>=0.9.1,<0.10"
        )
    transformer_impl.CPUOffloadPolicy = unpinned
