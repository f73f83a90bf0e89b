"""A kernel that this machine cannot run is refused by name, with the command that installs it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from verl_pg_plugin.attention.kernels import specs
from verl_pg_plugin.config import facts
from verl_pg_plugin.config.validate import validate

KEY = "prefix_grouper.attention_kernel"


@pytest.fixture
def installed(monkeypatch):
    """Names of the packages that the metadata lists in this test; empty at first."""
    packages = set()

    def version(package):
        if package not in packages:
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(specs, "version", version)
    return packages


@pytest.fixture
def on_device(monkeypatch):
    return lambda device_name: monkeypatch.setattr(facts, "get_device_name", lambda: device_name)


def violations_of(config):
    return [violation for violation in validate(config) if violation.rule == "attention_kernel"]


@pytest.mark.parametrize(
    ("kernel", "device_name", "packages"),
    [
        ("auto", "cpu", set()),
        ("sdpa", "cpu", set()),
        ("auto", "cuda", set()),
        ("torch_varlen", "cuda", set()),
        ("sdpa", "cuda", set()),
        ("flash_attn_2", "cuda", {"flash-attn"}),
        ("flash_attn_4", "cuda", {"flash-attn-4"}),
    ],
)
def test_kernels_that_can_run(kernel, device_name, packages, installed, on_device, make_config):
    installed |= packages
    on_device(device_name)
    assert violations_of(make_config(settings={KEY: kernel})) == []


@pytest.mark.parametrize(
    ("kernel", "other", "command"),
    [
        ("flash_attn_2", "flash-attn-4", "pip install --no-build-isolation flash-attn"),
        ("flash_attn_4", "flash-attn", "pip install --pre flash-attn-4"),
    ],
)
def test_a_missing_kernel_on_a_gpu_names_the_command_that_installs_it(
    kernel, other, command, installed, on_device, make_config
):
    """Both packages bring a module flash_attn: one of them is no proof of the other."""
    installed.add(other)
    on_device("cuda")
    (violation,) = violations_of(make_config(settings={KEY: kernel}))
    assert violation.fix == f"{command}, or ++{KEY}=auto"


@pytest.mark.parametrize("kernel", ["flash_attn_4", "flash_attn_2", "torch_varlen"])
def test_a_gpu_kernel_on_a_cpu_is_refused_with_the_setting_that_works(kernel, make_config):
    (violation,) = violations_of(make_config(settings={KEY: kernel}))
    assert violation.fix == f"++{KEY}=auto"


def test_unknown_kernel_lists_the_choices(make_config):
    (violation,) = validate(make_config(settings={KEY: "flash"}))
    assert "auto, flash_attn_4, flash_attn_3, flash_attn_2, torch_varlen, sdpa" in violation.why
