"""A kernel that this machine cannot run is refused by name, with the command that installs it."""

from __future__ import annotations

import pytest

from verl_pg_plugin.config.attention_kernel import attention_kernel_violation, flash_attn_installed
from verl_pg_plugin.config.validate import validate
from verl_pg_plugin.config.violation import Setting

KEY = "prefix_grouper.attention_kernel"


@pytest.mark.parametrize(
    ("kernel", "device_name", "has_flash_attn"),
    [
        ("auto", "cpu", False),
        ("auto", "cpu", True),
        ("sdpa", "cpu", False),
        ("auto", "cuda", True),
        ("flash_attn_2", "cuda", True),
        ("sdpa", "cuda", False),
    ],
)
def test_kernels_that_can_run(kernel, device_name, has_flash_attn):
    assert attention_kernel_violation(Setting(KEY, kernel), device_name, has_flash_attn) is None


@pytest.mark.parametrize("kernel", ["auto", "flash_attn_2"])
def test_gpu_run_without_flash_attn_names_the_extra(kernel):
    violation = attention_kernel_violation(Setting(KEY, kernel), "cuda", has_flash_attn=False)
    assert 'pip install "verl-pg-plugin[gpu]"' in violation.fix


def test_flash_attn_on_cpu():
    violation = attention_kernel_violation(Setting(KEY, "flash_attn_2"), "cpu", has_flash_attn=True)
    assert f"{KEY}=auto" in violation.fix


def test_unknown_kernel_lists_the_choices(make_config):
    (violation,) = validate(make_config(settings={KEY: "flash"}))
    assert "auto, flash_attn_2, sdpa" in violation.why


def test_installed_means_that_the_package_is_there():
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        assert not flash_attn_installed()
    else:
        assert flash_attn_installed()
