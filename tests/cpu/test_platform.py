"""The cpu platform is there on request and invisible otherwise."""

from __future__ import annotations

import pytest
import torch

from tests.fresh import run_fresh
from verl_pg_plugin.cpu.platform import CPUPlatform

SELECTED = """
import sys, verl
from verl.utils.device import get_device_name, get_device_id, get_torch_device
from verl.utils.distributed import initialize_global_process_group_ray as init
sys.stdout.write(f'{get_device_name()} {get_device_id()} {get_torch_device().__name__} {init.__defaults__}')
"""
LEFT_ALONE = """
import os, sys
os.environ.pop("VERL_PLATFORM", None)
import verl
from verl.plugin.platform.platform_manager import PlatformRegistry, _detect_platform_name
from verl.utils.distributed import initialize_global_process_group_ray as init
registered = 'cpu' in PlatformRegistry.registered_names()
sys.stdout.write(f'{registered} {_detect_platform_name() == "cpu"} {init.__defaults__}')
"""


def test_the_platform_is_selected_on_request_and_auto_detection_and_process_groups_are_left_alone_else() -> None:
    selected, left_alone = run_fresh([(SELECTED, {"VERL_PLATFORM": "cpu"}), (LEFT_ALONE, {})])
    assert selected.stdout.splitlines()[-1] == "cpu cpu verl_pg_plugin.cpu.device (None, 'cpu:gloo')", selected.stderr
    assert left_alone.stdout.splitlines()[-1] == "True False (None, None)", left_alone.stderr


def test_auto_detection_finds_the_platform_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert not CPUPlatform().is_platform_available(use_smi_check=True)
    monkeypatch.setenv("VERL_PLATFORM", " CPU ")
    assert CPUPlatform().is_platform_available(use_smi_check=True)


def test_tensors_moved_to_the_current_device_stay_on_the_cpu() -> None:
    assert torch.ones(1).to(CPUPlatform().current_device()).device == torch.device("cpu")


def test_memory_figures_and_rng_calls_that_verl_makes_work() -> None:
    device = CPUPlatform().device_module
    free, total = device.mem_get_info()
    assert 0 < free <= total
    assert device.memory_allocated() == device.max_memory_reserved() == 0
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_a_changed_upstream_signature_is_an_error_and_not_half_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.utils.distributed

    from verl_pg_plugin import upstream

    def changed(timeout_second: int | None = None, backends: str | None = None) -> None: ...

    monkeypatch.setattr(verl.utils.distributed, "initialize_global_process_group_ray", changed)
    with pytest.raises(upstream.UpstreamChangedError, match=r"tested with verl.*>=0\.9"):
        upstream.use_single_gloo_backend()
    assert changed.__defaults__ == (None, None)


def test_registering_twice_is_harmless() -> None:
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    from verl_pg_plugin import cpu

    cpu.register()
    cpu.register()
    assert get_rollout_class("hf").__name__ == "ServerAdapter"
    assert get_rollout_replica_class("hf").__name__ == "HFReplica"
