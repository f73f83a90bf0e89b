"""Can the attention kernel that was asked for run on this machine?"""

from __future__ import annotations

from verl_pg_plugin.attention.kernels.specs import ATTENTION_KERNELS, KERNELS
from verl_pg_plugin.config.violation import Setting, Violation


def attention_kernel_violation(setting: Setting, device_name: str) -> Violation | None:
    """Why the kernel cannot run on this machine, or None when nothing speaks against it.

    Starts no CUDA context, so the compute capability of a GPU is left to the engine.

    Args:
        setting: the requested kernel and the config key that it came from.
        device_name: device type as verl names it, such as "cuda" or "cpu".
    """
    if setting.value not in ATTENTION_KERNELS:
        why, fix = f"the attention kernels are {', '.join(ATTENTION_KERNELS)}", f"{setting.key}=auto"
        return Violation("attention_kernel", (setting,), why, fix)
    if setting.value == "auto":  # sdpa on a CPU, torch's own kernel on a GPU where no package is installed
        return None
    spec = KERNELS[setting.value]
    if spec.device_type not in (None, device_name):
        why = f"{setting.value} runs on device {spec.device_type!r}, this machine's is {device_name!r}"
        return Violation("attention_kernel", (setting,), why, f"{setting.key}=auto")
    if not spec.installed:
        why = f"it needs the package {spec.package}, which is not installed"
        return Violation("attention_kernel", (setting,), why, f"{spec.install}, or {setting.key}=auto")
    return None
