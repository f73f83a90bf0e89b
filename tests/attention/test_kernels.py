"""Kernels are chosen by name, once, and say why; what cannot run says what to do."""

import importlib.util

import pytest
import torch

from verl_pg_plugin.attention import select_kernel
from verl_pg_plugin.attention.kernels import KERNEL_NAMES, attend_sdpa


def test_auto_takes_sdpa_on_a_cpu_and_says_why() -> None:
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
        ValueError, match=f"unknown attention kernel 'fa9'; choose auto or one of {', '.join(KERNEL_NAMES)}"
    ):
        select_kernel("fa9", "cpu")


def test_flash_attn_on_a_cpu_is_refused_with_the_override_that_works() -> None:
    with pytest.raises(
        RuntimeError, match=r"needs a CUDA device, this is cpu; set prefix_grouper\.attention_kernel=auto"
    ):
        select_kernel("flash_attn_2", "cpu")


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
@pytest.mark.parametrize("name", ["auto", "flash_attn_2"])
def test_missing_flash_attn_on_a_gpu_never_falls_back_but_names_the_install_command(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"not installed: pip install 'verl-pg-plugin\[gpu\]'"):
        select_kernel(name, "cuda")


def test_queries_are_aligned_with_the_last_keys() -> None:
    """Top-left alignment would hide the prompt from a response."""
    q_THD, k_KGD = torch.zeros(1, 1, 2), torch.zeros(3, 1, 2)
    v_KGD = torch.tensor([1.0, 2.0, 6.0]).reshape(3, 1, 1).expand(3, 1, 2)
    bounds_q, bounds_k = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    out = attend_sdpa(q_THD, k_KGD, v_KGD, bounds_q, bounds_k, 1, 3, softmax_scale=1.0)
    torch.testing.assert_close(out, torch.full((1, 1, 2), 3.0))
    out = attend_sdpa(q_THD, k_KGD, v_KGD, bounds_q, bounds_k, 1, 3, softmax_scale=1.0, window_size=1)
    torch.testing.assert_close(out, torch.full((1, 1, 2), 4.0))
