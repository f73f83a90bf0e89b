"""Kernel selection by name or by device: with a reason, and never replaced silently."""

import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from verl_pg_plugin.attention import kernels, passes
from verl_pg_plugin.attention.passes import Varlen, softcap_fault

FLASH = ("flash-attn-4", "flash-attn-3", "flash-attn")
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend a GPU of some compute capability, or none, and installed packages."""

    def pretend(capability: tuple[int, int] | None, *packages: str) -> None:
        monkeypatch.setattr(kernels.compat, "installed", lambda package: "1.0" if package in packages else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return pretend


@pytest.mark.parametrize(
    ("setting", "device", "capability", "packages", "taken", "reason"),
    [
        ("auto", "cpu", None, (), "sdpa", "++prefix_grouper.attention_kernel=auto on device cpu"),
        ("sdpa", "cpu", None, (), "sdpa", "++prefix_grouper.attention_kernel=sdpa"),
        ("sdpa", "cuda", (9, 0), FLASH, "sdpa", "++prefix_grouper.attention_kernel=sdpa"),
        ("flash_attn_2", "cuda", (9, 0), FLASH, "flash_attn_2", ""),
        ("auto", "cuda", (9, 0), FLASH, "flash_attn_4", ""),
        ("auto", "cuda", (9, 0), FLASH[1:], "flash_attn_3", "flash_attn_4 needs flash-attn-4, which is not installed"),
        ("auto", "cuda", (9, 0), FLASH[2:], "flash_attn_2", "flash_attn_3 needs flash-attn-3, which is not installed"),
        ("auto", "cuda", (9, 0), (), "torch_varlen", "installed: pip install --no-build-isolation flash-attn"),
        # exactly the lowest capability of the chosen kernel
        ("auto", "cuda", (8, 0), FLASH[:1], "torch_varlen", "flash_attn_4 needs compute capability (9, 0), this"),
    ],
)
def test_kernel_selection(setting, device, capability, packages, taken, reason, machine, monkeypatch) -> None:
    """No other kernel is imported or compiled, not even to test softcap: flash-attn 4 compiles for minutes."""
    tried: list[str] = []
    machine(capability, *packages)
    monkeypatch.setattr(kernels, "load_passes", lambda name: (tried.append(name), None))
    monkeypatch.setattr(passes, "softcap_fault", lambda *_: "")
    kernel = kernels.select_kernel(setting, device, kernels.AttentionNeeds(softcap=kernels.KERNELS[taken].softcap))
    assert kernel.name == taken
    assert reason in kernel.reason
    assert set(tried) == {taken}


@pytest.mark.parametrize(
    ("setting", "device", "capability", "packages", "message"),
    [
        *[(name, "cpu", None, FLASH, f"{name} needs a cuda device, this is cpu: ++") for name in kernels.KERNELS][:-1],
        ("flash_attn_4", "cuda", (9, 0), (), "not installed: pip install --pre flash-attn-4"),
        ("flash_attn_2", "cuda", (9, 0), (), "not installed: pip install --no-build-isolation flash-attn"),
        ("flash_attn_3", "cuda", (8, 0), FLASH, "needs compute capability (9, 0), this GPU has (8, 0)"),
        ("flash_attn_3", "cuda", (10, 0), FLASH, "runs up to compute capability (9, 0), this GPU has (10, 0)"),
        ("torch_varlen", "cuda", None, (), "sees none; VERL_PLATFORM=cpu runs without"),
        # An old GPU never gets the slow kernel by itself.
        ("auto", "cuda", (7, 0), FLASH, "or set ++prefix_grouper.attention_kernel=sdpa (slow)"),
    ],
)
def test_unavailable_kernels_are_refused_with_a_fix(setting, device, capability, packages, message, machine) -> None:
    machine(capability, *packages)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        kernels.select_kernel(setting, device)


@pytest.mark.parametrize("error", [ImportError("no such file"), AttributeError("'cutlass' has no attribute 'ThrMma'")])
def test_broken_installs_are_errors(machine, monkeypatch, error) -> None:
    """The second error: flash-attn 2's early copy of flash-attn 4 with a newer cutlass."""
    machine((9, 0), *FLASH)
    monkeypatch.setattr(passes, "flash_attn_4", Mock(side_effect=error))
    with pytest.raises(
        RuntimeError, match=rf"flash_attn_4 is installed but cannot be imported \({error}\). Fix: reinstall"
    ):
        kernels.select_kernel("auto", "cuda")


@pytest.mark.parametrize(("width", "windows", "fits"), [(128, 1, 1), (256, 0, 1), (256, 1, 0), (192, 0, 0)])
def test_flash_attn_4_takes_fewer_widths_on_blackwell(width: int, windows: int, fits: int, machine: Machine) -> None:
    for capability, taken in (((9, 0), True), ((10, 0), fits)):
        machine(capability, "flash-attn-4")
        needs = kernels.AttentionNeeds(frozenset({(width, 128)}), windows=bool(windows))
        assert (kernels.kernel_obstacle("flash_attn_4", "cuda", needs) == "") == taken


def test_the_wider_of_keys_and_values_must_fit() -> None:
    for dims, unfit in ((256, 256), 0), ((264, 128), 264), ((128, 100), 0), ((100, 96), 100):
        unmet = f"takes head dims up to 256 in steps of 8, the model has {unfit}" if unfit else ""
        needs = kernels.AttentionNeeds(head_dims=frozenset({dims}))
        assert kernels.KERNELS["flash_attn_2"].unmet(needs) == unmet
        assert kernels.setting_obstacle("auto", "cpu", needs) == ""


FORWARD, BACKWARD = passes.sdpa()


def problem(lengths_q: list[int], lengths_k: list[int], **options: Any) -> Varlen:
    bounds = (torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k))
    return Varlen(*bounds, max(lengths_q), max(lengths_k), 0.5, **options)


def outcome(pair: passes.Passes, tensors: list[torch.Tensor], p: Varlen) -> list[torch.Tensor]:
    forward, backward = pair
    q, k, v, dout = tensors
    out, lse = forward(q, k, v, p)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    backward(dout, q, k, v, out, lse, *gradients, p)
    return [out, lse, *gradients]


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cpu_kernel_matches_the_written_out_passes(options, dtype, monkeypatch) -> None:
    """Segments of one query, square ones, and more keys than queries; without a causal mask also empty sides."""
    lengths = ([5, 1, 3, 2, 0], [5, 4, 9, 0, 2]) if options == {"causal": False} else ([5, 1, 3], [5, 4, 9])
    p, generator = problem(*lengths, **options), torch.Generator().manual_seed(0)
    sizes = [(sum(lengths[0]), 4), (sum(lengths[1]), 2), (sum(lengths[1]), 2), (sum(lengths[0]), 4)]
    tensors = [torch.randn(*size, 8, generator=generator).to(dtype) for size in sizes]
    actual = outcome(passes.sdpa(), tensors, p)
    written_out = passes._written_out_forward, passes._written_out_backward, 2
    monkeypatch.setattr(passes, "_of_segment", lambda q, p: written_out)
    rtol = 1e-12 if dtype == torch.float64 else 0.02
    torch.testing.assert_close(actual, outcome(passes.sdpa(), tensors, p), rtol=rtol, atol=rtol)


def of_flash_attn_3(given: dict[str, Any], causal: bool) -> Varlen:
    left, right = given["window_size_left"], given["window_size_right"]
    assert right == (0 if left >= 0 else -1), "a causal window ends at the query"
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
    return Varlen(*(given[name] for name in names), causal, left, given["softcap"])


def flash_attn_3_forward(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
):  # fmt: skip
    """Compute with sdpa, with upstream's signature (commit 01afd16)."""
    return (*FORWARD(q, k, v, of_flash_attn_3(locals(), causal)), None, None)


def flash_attn_3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
    dq, dk, dv, softmax_scale, is_causal, window_size_left, window_size_right, softcap, deterministic, sm_margin=0,
):  # fmt: skip
    assert deterministic
    assert is_causal or not any(gradient.any() for gradient in (dq, dk, dv)), "the kernel may leave some unwritten"
    BACKWARD(dout, q, k, v, out, softmax_lse, dq, dk, dv, of_flash_attn_3(locals(), is_causal))


def install_flash_attn_3(monkeypatch: pytest.MonkeyPatch, forward: Any, backward: Any) -> None:
    module: Any = ModuleType("flash_attn_interface")
    module._flash_attn_forward, module._flash_attn_backward = forward, backward
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(passes, "flash_attn_3", passes.flash_attn_3.__wrapped__)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}, {"softcap": 3.0}], ids=str)
def test_flash_attn_3_is_called_by_its_signature(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash_attn_3(monkeypatch, flash_attn_3_forward, flash_attn_3_backward)
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    p = problem([5, 1, 3], [5, 4, 9], **options)
    tensors = [torch.randn(n, h, 8) for n, h in ((9, 4), (18, 2), (18, 2), (9, 4))]
    for got, want in zip(outcome(passes.flash_attn_3(), tensors, p), outcome(passes.sdpa(), tensors, p), strict=True):
        assert torch.equal(got, want)


def test_early_flash_attn_3_builds_and_softcap_on_torch_varlen_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash_attn_3(monkeypatch, lambda q, k, v, window_size=(-1, -1): None, None)
    with pytest.raises(RuntimeError, match=r"flash_attn_3 .* cannot be imported \(an early build"):
        kernels.load_passes("flash_attn_3")
    forward, _ = passes.torch_varlen()
    q = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"no softcap. Fix: .* and set \+\+prefix_grouper\.att"):
        forward(q, q, q, problem([2], [2], softcap=30.0))


def without_caps(*tensors: Any) -> Any:
    *tensors, p = tensors
    return (BACKWARD if len(tensors) > 3 else FORWARD)(*tensors, p._replace(softcap=0.0))


def scores_times_cap(*tensors: Any) -> Any:
    """Compute what flash-attn 2.8.3 does without softcap in its build."""
    *tensors, p = tensors
    return without_caps(*tensors, p._replace(softmax_scale=p.softmax_scale * p.softcap))


def no_numbers(*tensors: Any) -> Any:
    out, lse = FORWARD(*tensors)
    return out * torch.nan, lse


def in_bf16(*tensors: Any) -> Any:
    *tensors, p = tensors
    out, lse = FORWARD(*(x.bfloat16() for x in tensors), p)
    return out.float(), lse


def test_kernels_that_do_not_cap_scores_are_detected() -> None:
    capped = (FORWARD, BACKWARD), (in_bf16, BACKWARD)
    wrong = ((without_caps,) * 2, (scores_times_cap,) * 2, (FORWARD, without_caps), (no_numbers, BACKWARD))
    with torch.inference_mode():
        for head_dim in (8, 256):
            assert not any(softcap_fault(pair, head_dim, "cpu") for pair in capped)
            assert all(softcap_fault(pair, head_dim, "cpu") for pair in wrong)


def test_softcap_models_refuse_kernels_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` skips and names a kernel that raises; the widest heads are tried."""
    needs = kernels.AttentionNeeds(head_dims=frozenset({(64, 32), (96, 128)}), softcap=True)
    raises = Mock(side_effect=AssertionError("this build does not support softcap"))
    pairs = {"raises": (raises, BACKWARD), "uncapped": (without_caps, without_caps), "sdpa": passes.sdpa()}
    for name in ("raises", "uncapped"):
        monkeypatch.setitem(kernels.KERNELS, name, kernels.KernelSpec(package="torch", install="pip install it"))
    monkeypatch.setattr(kernels, "load_passes", pairs.__getitem__)
    monkeypatch.setattr(kernels, "candidates", lambda name, device: tuple(pairs) if name == "auto" else (name,))
    chosen = kernels.select_kernel("auto", "cpu", needs)
    assert chosen.name == "sdpa"
    assert "raises does not take capped scores (softcap): AssertionError: this build does not" in chosen.reason
    assert "uncapped does not cap scores (softcap) as it is built" in chosen.reason
    assert raises.call_args.args[0].shape[-1] == 128
    with pytest.raises(RuntimeError, match=r"uncapped does not cap scores.*: pip install it"):
        kernels.select_kernel("uncapped", "cpu", needs)
    assert kernels.select_kernel("uncapped", "cpu").name == "uncapped"
    with pytest.raises(torch.OutOfMemoryError):
        softcap_fault((Mock(side_effect=torch.OutOfMemoryError), BACKWARD), 64, "cpu")
