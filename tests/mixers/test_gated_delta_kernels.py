"""Machines whose kernels would compute the gated delta rule wrongly are told what to install, before anything runs."""

import subprocess

import pytest
from packaging.version import Version

from verl_pg_plugin.mixers import gated_delta as kernels
from verl_pg_plugin.mixers.gated_delta import gpu_generations, kernel_obstacles


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A GPU machine: its generations, its Triton, and the packages that it has."""

    def make(generations: set[int], triton: str | None, *packages: str) -> None:
        monkeypatch.setattr(kernels, "gpu_generations", lambda: frozenset(generations))
        monkeypatch.setattr(kernels, "find_spec", lambda name: object() if name in packages else None)
        monkeypatch.setattr(kernels, "_installed", lambda name: Version(triton) if triton else None)

    return make


@pytest.mark.parametrize("triton", ["3.4.0", "3.6.0", "3.7.0"])
def test_triton_with_a_wrong_backward_on_hopper_is_refused(machine, triton: str) -> None:
    machine({9}, triton, "fla")
    (reason,) = kernel_obstacles("cuda")
    assert "wrong on Hopper" in reason
    assert triton in reason
    assert "triton>=3.7.1" in reason


@pytest.mark.parametrize(
    ("generations", "triton", "packages"),
    [
        ({9}, "3.3.1", ("fla",)),
        ({9}, "3.7.1", ("fla",)),
        ({9}, "3.6.0", ("fla", "tilelang")),
        ({8}, "3.6.0", ("fla",)),
        ({10}, "3.6.0", ("fla",)),
        (set(), "3.6.0", ("fla",)),
    ],
    ids=["before the fault", "mended", "by tilelang", "ampere", "blackwell", "no GPU here"],
)
def test_other_machines_are_not(machine, generations: set[int], triton: str, packages: tuple[str, ...]) -> None:
    machine(generations, triton, *packages)
    assert kernel_obstacles("cuda") == []


def test_a_gpu_without_fla_is_refused(machine) -> None:
    machine({9}, "3.7.1")
    (reason,) = kernel_obstacles("cuda")
    assert reason.endswith("not installed: pip install fla-core")


def test_a_cpu_needs_nothing(machine) -> None:
    machine(set(), None)
    assert kernel_obstacles("cpu") == []


@pytest.mark.parametrize(
    ("output", "code", "generations"),
    [("9.0\n9.0\n", 0, {9}), ("8.6\n12.0\n", 0, {8, 12}), ("no devices were found\n", 6, set()), ("[N/A]\n", 0, set())],
)
def test_generations_are_what_nvidia_smi_says(monkeypatch, output: str, code: int, generations: set[int]) -> None:
    monkeypatch.setattr(kernels.shutil, "which", lambda name: name)
    monkeypatch.setattr(kernels.torch.cuda, "is_initialized", lambda: False)
    done = subprocess.CompletedProcess([], code, stdout=output)
    monkeypatch.setattr(kernels.subprocess, "run", lambda *args, **kwargs: done)
    assert gpu_generations() == generations


@pytest.mark.parametrize(("smi", "in_use"), [(None, False), (None, True), ("nvidia-smi", True)])
def test_torch_is_asked_where_nvidia_smi_is_missing_or_a_gpu_is_in_use(monkeypatch, smi, in_use: bool) -> None:
    monkeypatch.setattr(kernels.shutil, "which", lambda name: smi)
    monkeypatch.setattr(kernels.torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(kernels.torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    assert gpu_generations() == {9}
