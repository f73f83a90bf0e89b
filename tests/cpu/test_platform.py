"""The cpu platform is there on request and invisible otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from verl_pg_plugin.cpu.platform import CPUPlatform


def run_python(code: str, **environment: str) -> str:
    """Last line of standard output of a fresh interpreter, without the caller's VERL_* variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_verl_platform_cpu_selects_the_platform_in_a_fresh_process() -> None:
    code = (
        "import sys, verl\n"
        "from verl.utils.device import get_device_name, get_device_id, get_torch_device\n"
        "from verl.utils.distributed import initialize_global_process_group_ray as init\n"
        "sys.stdout.write(f'{get_device_name()} {get_device_id()} {get_torch_device().__name__} {init.__defaults__}')"
    )
    assert run_python(code, VERL_PLATFORM="cpu") == "cpu cpu verl_pg_plugin.cpu.device (None, 'cpu:gloo')"


def test_installing_the_plugin_leaves_auto_detection_and_process_groups_alone() -> None:
    code = (
        "import sys, verl\n"
        "from verl.plugin.platform.platform_manager import PlatformRegistry, _detect_platform_name\n"
        "from verl.utils.distributed import initialize_global_process_group_ray as init\n"
        "registered = 'cpu' in PlatformRegistry.registered_names()\n"
        "sys.stdout.write(f'{registered} {_detect_platform_name()} {init.__defaults__}')"
    )
    registered, detected, *defaults = run_python(code).split(maxsplit=2)
    assert registered == "True"
    assert detected != "cpu"
    assert defaults == ["(None, None)"]


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
    with pytest.raises(upstream.UpstreamChangedError, match=r"the plugin needs verl.*>=0\.9"):
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
