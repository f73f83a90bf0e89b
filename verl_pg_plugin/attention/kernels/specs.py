"""The attention kernels of packed mode: their names, what each needs, and whether this machine has it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from verl_pg_plugin.config.violation import Setting, Violation

ATTENTION_KERNEL = "prefix_grouper.attention_kernel"


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel needs.

    Attributes:
        module: imported when the kernel is chosen, never before; its function ``attend`` is the kernel.
        device_type: the only device that runs it; None for every device.
        min_capability: lowest compute capability of a CUDA device.
        package: distribution that must be installed; None where torch is enough.
        install: command that installs the package.
    """

    module: str
    device_type: str | None = None
    min_capability: tuple[int, int] = (0, 0)
    package: str | None = None
    install: str = ""

    @property
    def installed(self) -> bool:
        """Whether the package is there.

        Asks the package metadata: an import would load CUDA libraries, and both flash-attn 2 and flash-attn 4 bring a
        folder ``flash_attn/cute``.
        """
        if self.package is None:
            return True
        try:
            version(self.package)
        except PackageNotFoundError:
            return False
        return True


KERNELS: dict[str, KernelSpec] = {
    "flash_attn_4": KernelSpec(
        "verl_pg_plugin.attention.kernels.flash_attn_4",
        "cuda",
        (9, 0),
        "flash-attn-4",
        "pip install --pre flash-attn-4",
    ),
    "flash_attn_2": KernelSpec(
        "verl_pg_plugin.attention.kernels.flash_attn_2",
        "cuda",
        (8, 0),
        "flash-attn",
        'pip install "verl-pg-plugin[gpu]"',
    ),
    "torch_varlen": KernelSpec("verl_pg_plugin.attention.kernels.torch_varlen", "cuda", (8, 0)),
    "sdpa": KernelSpec("verl_pg_plugin.attention.kernels.sdpa"),
}
"""Every kernel by name; on a GPU, "auto" takes the first that runs there and needs one, elsewhere sdpa."""

ATTENTION_KERNELS = ("auto", *KERNELS)


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
