"""Whether the requested attention kernel can run on this machine."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from verl_pg_plugin.config.violation import Setting, Violation

ATTENTION_KERNEL = "prefix_grouper.attention_kernel"
ATTENTION_KERNELS = ("auto", "flash_attn_2", "sdpa")


def flash_attn_installed() -> bool:
    """True when the flash-attn 2 package is installed.

    Asks the package metadata: importing it would touch CUDA, and flash-attn 4 brings a
    ``flash_attn`` folder of its own.
    """
    try:
        version("flash-attn")
    except PackageNotFoundError:
        return False
    return True


def attention_kernel_violation(setting: Setting, device_name: str, has_flash_attn: bool) -> Violation | None:
    """Why the kernel cannot run on this machine, or None when it can.

    Args:
        setting: the requested kernel and the config key that it came from.
        device_name: device type as verl names it, such as "cuda" or "cpu".
        has_flash_attn: whether flash-attn 2 is installed.
    """
    if setting.value not in ATTENTION_KERNELS:
        why, fix = f"the attention kernels are {', '.join(ATTENTION_KERNELS)}", f"{setting.key}=auto"
    elif device_name == "cpu" and setting.value == "flash_attn_2":
        why, fix = "flash-attn runs on GPUs only", f"{setting.key}=auto (sdpa on CPU)"
    elif device_name == "cpu" or setting.value == "sdpa" or has_flash_attn:
        return None
    else:
        why = f"flash-attn is not installed, and this kernel needs it on device {device_name!r}"
        fix = (
            'pip install "verl-pg-plugin[gpu]", '
            f"or {setting.key}=sdpa (slower), or VERL_PLATFORM=cpu on a machine without a GPU"
        )
    return Violation("attention_kernel", (setting,), why, fix)
