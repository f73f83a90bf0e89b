"""The attention kernels: what each needs, what it computes, and whether this machine has it.

A new kernel is its file beside this one and its entry in ``KERNELS``. This module imports none of them, nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

ATTENTION_KERNEL = "prefix_grouper.attention_kernel"


@dataclass(frozen=True)
class AttentionNeeds:
    """What the attention layers of a model ask of a kernel.

    Attributes:
        head_dims: (width of queries and keys, width of values) of every kind of layer.
        softcap: scores are capped.
        sinks: every head has a learned sink.
    """

    head_dims: frozenset[tuple[int, int]] = frozenset()
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel needs and computes.

    Attributes:
        module: imported when the kernel is chosen, never before; its function ``attend`` is the kernel.
        saved_ops: what its forward may be to torch's dispatcher, at least one of which exists; gradient checkpointing
            keeps their outputs.
        device_type: the only device that runs it; None for every device.
        min_capability: lowest compute capability of a CUDA device.
        max_capability: the highest; None where later devices run it too.
        package: distribution that must be installed; None where torch is enough.
        install: command that installs the package.
        head_dim_multiple: what divides every width of a head that it takes.
        max_head_dim: the largest width that it takes; None for no largest.
        softcap: whether it caps scores.
        sinks_on: the type of device on which it takes learned attention sinks; None for nowhere.
        narrow_values: whether values may be narrower than keys; where not, ``VarlenKernel`` pads them.
        widens_gradients: where several query heads share a key/value head, the backward holds gradients of keys and
            values for each query head and then sums them; else it sums them in float32 as it goes.
        reads_trunks: it is a ``FlashAttention``, whose backward, without a window, does without copies of trunks.
    """

    module: str
    saved_ops: tuple[str, ...]
    device_type: str | None = None
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] | None = None
    package: str | None = None
    install: str = ""
    head_dim_multiple: int = 1
    max_head_dim: int | None = None
    softcap: bool = False
    sinks_on: str | None = None
    narrow_values: bool = False
    widens_gradients: bool = False
    reads_trunks: bool = False

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

    def obstacle(self, device_type: str) -> str:
        """Why this machine cannot run it on a type of device and what to do; empty if it can. Starts no CUDA context."""
        if self.device_type not in (None, device_type):
            return f"needs a {self.device_type} device, this is {device_type}: ++{ATTENTION_KERNEL}=auto"
        if not self.installed:
            return f"needs {self.package}, which is not installed: {self.install}"
        return ""

    def misfit(self, needs: AttentionNeeds, device_type: str) -> str:
        """What a model needs and this kernel does not compute on a device; empty if nothing."""
        if needs.softcap and not self.softcap:
            return "does not cap scores (softcap)"
        if needs.sinks and self.sinks_on != device_type:
            where = f" on a {device_type} device, only on {self.sinks_on}" if self.sinks_on else ""
            return f"takes no learned attention sinks{where}"
        for width in sorted({max(dims) for dims in needs.head_dims}):
            if width % self.head_dim_multiple:
                return f"takes heads of a multiple of {self.head_dim_multiple} numbers, the model's have {width}"
            if self.max_head_dim is not None and width > self.max_head_dim:
                return f"takes heads of up to {self.max_head_dim} numbers, the model's have {width}"
        return ""


KERNELS: dict[str, KernelSpec] = {
    "flash_attn_4": KernelSpec(
        "verl_pg_plugin.attention.kernels.flash_attn_4",
        saved_ops=("verl_pg_plugin::flash_attn_4_forward",),
        device_type="cuda",
        min_capability=(9, 0),
        package="flash-attn-4",
        install="pip install --pre flash-attn-4",
        head_dim_multiple=8,
        max_head_dim=256,
        softcap=True,
        reads_trunks=True,
    ),
    "flash_attn_3": KernelSpec(
        "verl_pg_plugin.attention.kernels.flash_attn_3",
        saved_ops=("flash_attn_3::_flash_attn_forward", "flash_attn_3::fwd"),  # the second in builds without the first
        device_type="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        package="flash-attn-3",
        install="pip install ./hopper in a checkout of https://github.com/Dao-AILab/flash-attention",
        head_dim_multiple=8,
        max_head_dim=256,
        softcap=True,
    ),
    "flash_attn_2": KernelSpec(
        "verl_pg_plugin.attention.kernels.flash_attn_2",
        # The second in towers, which do not come here.
        saved_ops=("verl_pg_plugin::flash_attn_2_forward", "flash_attn::_flash_attn_varlen_forward"),
        device_type="cuda",
        min_capability=(8, 0),
        package="flash-attn",
        install="pip install --no-build-isolation flash-attn",
        head_dim_multiple=8,
        max_head_dim=256,
        softcap=True,
        widens_gradients=True,
        reads_trunks=True,
    ),
    "torch_varlen": KernelSpec(
        "verl_pg_plugin.attention.kernels.torch_varlen",
        saved_ops=("torch_attn::_varlen_attn",),
        device_type="cuda",
        min_capability=(8, 0),
        head_dim_multiple=8,
        max_head_dim=256,
        widens_gradients=True,
    ),
    "sdpa": KernelSpec(
        "verl_pg_plugin.attention.kernels.sdpa",
        saved_ops=(
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
        ),
        sinks_on="cpu",
        narrow_values=True,
    ),
}
"""Every kernel by name, the fastest first. On a GPU "auto" takes the first that runs there, needs one and fits the
model; elsewhere sdpa."""

ATTENTION_KERNELS = ("auto", *KERNELS)


def candidates(name: str, device_type: str) -> tuple[str, ...]:
    """Kernels that a setting stands for on a device, in the order in which they are tried."""
    if name != "auto":
        return (name,)
    if device_type != "cuda":
        return ("sdpa",)
    return tuple(kernel for kernel, spec in KERNELS.items() if spec.device_type == device_type)


def model_misfit(name: str, device_type: str, needs: AttentionNeeds) -> str:
    """Why no kernel that ``name`` stands for computes a model's attention; empty if one does.

    Of those of "auto" one that is not installed is none. One that was asked for by name is ``KernelSpec.obstacle``'s.
    """
    found = {}
    for kernel in candidates(name, device_type):
        missing = KERNELS[kernel].obstacle(device_type) if name == "auto" else ""
        found[kernel] = KERNELS[kernel].misfit(needs, device_type) or missing
    return "; ".join(f"{kernel} {why}" for kernel, why in found.items()) if all(found.values()) else ""
