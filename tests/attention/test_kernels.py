"""The kernel of a process: chosen by name or by device, with a reason, and never replaced behind the user's back."""

import re
import sys
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

from verl_pg_plugin.attention.kernels import selection, specs
from verl_pg_plugin.attention.kernels.sdpa import attend as attend_sdpa
from verl_pg_plugin.attention.kernels import Kernel, select_kernel

HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the packages that the metadata lists in this test; empty at first."""
    packages: set[str] = set()

    def version(package: str) -> str:
        if package not in packages:
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(specs, "version", version)
    return packages


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_auto_on_a_cpu_is_sdpa_and_says_why() -> None:
    kernel = select_kernel("auto", "cpu")
    assert (kernel.name, kernel.attend) == ("sdpa", attend_sdpa)
    assert kernel.reason == "prefix_grouper.attention_kernel=auto on device cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_asked_for_by_name_is_the_one_that_runs(device: str) -> None:
    kernel = select_kernel("sdpa", device)
    assert kernel.attend is attend_sdpa
    assert kernel.reason == "prefix_grouper.attention_kernel=sdpa"


def test_an_unknown_kernel_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(
        ValueError, match=f"unknown attention kernel 'fa9'; choose one of auto, {', '.join(specs.KERNELS)}"
    ):
        select_kernel("fa9", "cpu")


@pytest.mark.parametrize("name", ["flash_attn_4", "flash_attn_3", "flash_attn_2", "torch_varlen"])
def test_a_gpu_kernel_on_a_cpu_is_refused_with_the_override_that_works(name: str) -> None:
    with pytest.raises(
        RuntimeError, match=rf"{name} needs a cuda device, this is cpu: \+\+prefix_grouper\.attention_kernel=auto"
    ):
        select_kernel(name, "cpu")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("flash_attn_4", "pip install --pre flash-attn-4"),
        ("flash_attn_2", "pip install --no-build-isolation flash-attn"),
    ],
)
def test_a_missing_kernel_asked_for_by_name_names_the_install_command(
    name: str, command: str, installed: set[str]
) -> None:
    with pytest.raises(RuntimeError) as caught:
        select_kernel(name, "cuda")
    assert "not installed" in str(caught.value)
    assert command in str(caught.value)


@pytest.mark.parametrize(
    ("capability", "packages", "chosen", "because"),
    [
        (
            (9, 0),
            set(),
            "torch_varlen",
            "flash_attn_2 needs flash-attn, which is not installed: pip install --no-build-isolation flash-attn",
        ),
        ((8, 0), {"flash-attn-4"}, "torch_varlen", "flash_attn_4 needs compute capability (9, 0), this GPU has (8, 0)"),
    ],
)
def test_auto_on_a_gpu_says_what_kept_it_from_a_faster_kernel(
    capability: tuple[int, int],
    packages: set[str],
    chosen: str,
    because: str,
    installed: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpu(monkeypatch, capability)
    installed |= packages
    kernel = select_kernel("auto", "cuda")
    assert kernel.name == chosen
    assert because in kernel.reason


@pytest.mark.parametrize(
    ("packages", "chosen"),
    [
        ({"flash-attn-4", "flash-attn-3", "flash-attn"}, "flash_attn_4"),
        ({"flash-attn-3", "flash-attn"}, "flash_attn_3"),
        ({"flash-attn"}, "flash_attn_2"),
    ],
)
def test_auto_on_hopper_takes_the_latest_that_is_installed(packages, chosen, installed, monkeypatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(selection, "load_kernel", lambda name: attend_sdpa)
    installed |= packages
    assert select_kernel("auto", "cuda").name == chosen


@pytest.mark.parametrize(
    ("capability", "because"),
    [((8, 0), "needs compute capability (9, 0)"), ((10, 0), "runs up to compute capability (9, 0)")],
)
def test_a_kernel_for_hopper_is_refused_on_other_gpus(capability, because, installed, monkeypatch) -> None:
    pretend_gpu(monkeypatch, capability)
    installed.add("flash-attn-3")
    with pytest.raises(RuntimeError, match=re.escape(f"flash_attn_3 {because}, this GPU has {capability}")):
        select_kernel("flash_attn_3", "cuda")


def test_auto_never_takes_the_slow_kernel_on_an_old_gpu_but_names_it(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (7, 0))
    with pytest.raises(RuntimeError, match=r"no attention kernel .*\+prefix_grouper\.attention_kernel=sdpa \(slow\)"):
        select_kernel("auto", "cuda")


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_cuda_without_a_gpu_names_the_platform_that_needs_none() -> None:
    with pytest.raises(RuntimeError, match="VERL_PLATFORM=cpu"):
        select_kernel("torch_varlen", "cuda")


@pytest.mark.parametrize("error", [ImportError("no such file"), AttributeError("'cutlass' has no attribute 'ThrMma'")])
def test_a_broken_install_is_an_error_and_no_fallback(
    installed: set[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The second is that of flash-attn 2's early copy of flash-attn 4 beside a newer cutlass."""

    def broken(name: str) -> Any:
        raise error

    pretend_gpu(monkeypatch, (9, 0))
    installed |= {"flash-attn-4", "flash-attn"}
    monkeypatch.setattr(selection.importlib, "import_module", broken)
    with pytest.raises(
        RuntimeError, match=rf"flash_attn_4 is installed but cannot be imported \({error}\); reinstall it"
    ):
        select_kernel("auto", "cuda")


def test_choosing_one_kernel_imports_no_other() -> None:
    before = set(sys.modules)
    select_kernel("sdpa", "cuda")
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in ("flash_attn", "cutlass")}


def test_queries_are_aligned_with_the_last_keys() -> None:
    """Top-left alignment would hide the prompt from a response."""
    q_THD, k_KGD = torch.zeros(1, 1, 2), torch.zeros(3, 1, 2)
    v_KGD = torch.tensor([1.0, 2.0, 6.0]).reshape(3, 1, 1).expand(3, 1, 2)
    bounds_q, bounds_k = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    out = attend_sdpa(q_THD, k_KGD, v_KGD, bounds_q, bounds_k, 1, 3, softmax_scale=1.0)
    torch.testing.assert_close(out, torch.full((1, 1, 2), 3.0))
    out = attend_sdpa(q_THD, k_KGD, v_KGD, bounds_q, bounds_k, 1, 3, softmax_scale=1.0, window_size=1)
    torch.testing.assert_close(out, torch.full((1, 1, 2), 4.0))


def test_a_gpu_of_exactly_the_lowest_capability_runs_a_kernel(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (8, 0))
    assert select_kernel("auto", "cuda").name == "torch_varlen"


def test_narrow_values_are_padded_for_a_kernel_that_takes_none_and_cut_again() -> None:
    """Multi-head latent attention: keys of 6 numbers, values of 4."""
    widths = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        widths.append(v.shape[-1])
        return v

    values = torch.arange(8.0).reshape(2, 1, 4)
    keys = torch.zeros(2, 1, 6)
    for name, width in (("flash_attn_2", 6), ("sdpa", 4)):
        assert torch.equal(Kernel(name, "", attend)(keys, keys, values), values)
        assert widths.pop() == width


def test_sdpa_is_no_way_out_for_a_model_that_it_does_not_compute(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (7, 0))
    with pytest.raises(RuntimeError, match=r"set \+\+prefix_grouper\.attention_kernel=sdpa \(slow\)$"):
        select_kernel("auto", "cuda")
    for needs in (specs.AttentionNeeds(softcap=True), specs.AttentionNeeds(sinks=True)):
        with pytest.raises(RuntimeError, match="no attention kernel") as caught:
            select_kernel("auto", "cuda", needs)
        assert "sdpa" not in str(caught.value)


@pytest.mark.parametrize(
    ("dims", "misfit"),
    [
        ((256, 256), ""),
        ((264, 264), "takes heads of up to 256 numbers, the model's have 264"),
        ((264, 128), "takes heads of up to 256 numbers, the model's have 264"),
        ((128, 100), ""),
        ((100, 96), "takes heads of a multiple of 8 numbers, the model's have 100"),
    ],
)
def test_a_kernel_fits_by_the_wider_of_keys_and_values(dims: tuple[int, int], misfit: str) -> None:
    needs = specs.AttentionNeeds(head_dims=frozenset({dims}))
    assert specs.KERNELS["flash_attn_2"].misfit(needs, "cuda") == misfit
