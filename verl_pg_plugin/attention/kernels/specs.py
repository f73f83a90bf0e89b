"""The attention kernels of packed mode: their names, what each needs, and whether this machine has it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

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
