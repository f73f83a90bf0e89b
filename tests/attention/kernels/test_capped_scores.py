"""A kernel that does not cap scores, or not in its backward, is refused before a model that caps them runs on it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.architectures.test_every_model import capped_attention
from verl_pg_plugin.attention.kernels import sdpa, selection
from verl_pg_plugin.attention.kernels.capped_scores import TOLERANCE, cap_fault
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.attention.kernels import KERNELS, AttentionNeeds

CAPPED = AttentionNeeds(head_dims=frozenset({(64, 64)}), softcap=True)


def without_caps(*args: Any, softcap: float, **options: Any) -> torch.Tensor:
    return capped_attention(*args, softcap=0.0, **options)


def scores_times_cap(*args: Any, softcap: float, softmax_scale: float, **options: Any) -> torch.Tensor:
    """As flash-attn 2.8.3 does, built without capped scores."""
    return capped_attention(*args, softcap=0.0, softmax_scale=softmax_scale * softcap, **options)


def gradients_without_caps(*args: Any, **options: Any) -> torch.Tensor:
    plain = without_caps(*args, **options)
    return plain + (capped_attention(*args, **options) - plain).detach()


def in_bf16(*args: Any, **options: Any) -> torch.Tensor:
    return capped_attention(*(x.bfloat16() for x in args[:3]), *args[3:], **options)


def refuses(error: type[Exception]) -> Callable[..., torch.Tensor]:
    def attend(*args: Any, **options: Any) -> torch.Tensor:
        raise error("this build does not support softcap")

    return attend


def no_numbers(*args: Any, **options: Any) -> torch.Tensor:
    return capped_attention(*args, **options) * float("nan")


@pytest.fixture(params=[without_caps, scores_times_cap, gradients_without_caps])
def wrong(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    return request.param


@pytest.mark.parametrize("head_dim", [8, 64, 256])
@pytest.mark.parametrize("attend", [capped_attention, in_bf16])
def test_a_kernel_that_caps_scores_has_no_fault(attend: Callable[..., torch.Tensor], head_dim: int) -> None:
    assert cap_fault(attend, head_dim, "cpu") == ""


@pytest.mark.parametrize("head_dim", [8, 64, 256])
def test_a_kernel_without_caps_is_told_by_its_gradients_at_least(
    wrong: Callable[..., torch.Tensor], head_dim: int
) -> None:
    fault = cap_fault(wrong, head_dim, "cpu")
    assert "dq is off by" in fault
    assert "dk is off by" in fault
    assert ("out is off by" in fault) == (wrong is not gradients_without_caps)


def test_a_kernel_that_makes_no_numbers_is_told_too() -> None:
    assert "out is off by nan" in cap_fault(no_numbers, 64, "cpu")


def test_the_tolerance_lies_far_from_bf16_and_from_a_kernel_without_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    for times, attend, faulty in ((1 / 4, in_bf16, False), (4, gradients_without_caps, True)):
        monkeypatch.setattr("verl_pg_plugin.attention.kernels.capped_scores.TOLERANCE", times * TOLERANCE)
        assert bool(cap_fault.__wrapped__(attend, 64, "cpu")) == faulty


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_a_model_that_caps_scores_is_refused_on_a_kernel_built_without(
    name: str, wrong: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, "sdpa", replace(KERNELS["sdpa"], softcap=True, install="pip install it"))
    monkeypatch.setattr(sdpa, "attend", wrong)
    with pytest.raises(RuntimeError, match=r"sdpa does not cap scores \(softcap\) as it is built.*: pip install it"):
        select_kernel(name, "cpu", CAPPED)
    assert select_kernel(name, "cpu", replace(CAPPED, softcap=False)).name == "sdpa"
    monkeypatch.setattr(sdpa, "attend", capped_attention)
    assert select_kernel(name, "cpu", CAPPED).name == "sdpa"


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, NotImplementedError])
def test_a_build_that_raises_is_passed_over_and_named(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"raises": refuses(error), "sdpa": capped_attention}
    for name in kernels:
        monkeypatch.setitem(KERNELS, name, replace(KERNELS["sdpa"], softcap=True, install="pip install it"))
    monkeypatch.setattr(selection, "load_kernel", kernels.__getitem__)
    monkeypatch.setattr(selection, "candidates", lambda name, device: tuple(kernels) if name == "auto" else (name,))
    monkeypatch.setattr(selection, "ATTENTION_KERNELS", ("auto", *kernels))
    said = f"raises does not take capped scores (softcap): {error.__name__}: this build does not support softcap"
    chosen = select_kernel("auto", "cpu", CAPPED)
    assert chosen.name == "sdpa"
    assert said in chosen.reason
    with pytest.raises(RuntimeError) as caught:
        select_kernel("raises", "cpu", CAPPED)
    assert said in str(caught.value)


def test_memory_that_ends_while_looking_is_no_fault_of_the_kernel() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        cap_fault(refuses(torch.OutOfMemoryError), 64, "cpu")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_looking_needs_no_gradient_mode_and_leaves_it(mode: Callable) -> None:
    with mode():
        assert cap_fault.__wrapped__(capped_attention, 64, "cpu") == ""
        assert not torch.is_grad_enabled()


def test_the_widest_heads_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def attend(*args: Any, **options: Any) -> torch.Tensor:
        widths.append(args[0].shape[-1])
        return capped_attention(*args, **options)

    monkeypatch.setitem(KERNELS, "sdpa", replace(KERNELS["sdpa"], softcap=True))
    monkeypatch.setattr(sdpa, "attend", attend)
    select_kernel("sdpa", "cpu", replace(CAPPED, head_dims=frozenset({(64, 32), (96, 128)})))
    assert widths == [128]
