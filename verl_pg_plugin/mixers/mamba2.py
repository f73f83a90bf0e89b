"""Mamba2 (https://arxiv.org/abs/2405.21060) over packed tokens: a short convolution, then a selective scan.

``convolution.py`` and ``recurrence.py`` are shared with Gated DeltaNet. transformers' layers scan inside of their
forward, so ``install`` replaces it; projections and norms stay theirs. The scan is torch code that no GPU has run.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_pg_plugin.attention.context import ForwardContext
from verl_pg_plugin.attention.interface import WITHOUT_EFFECT
from verl_pg_plugin.issue import SHARING_OFF
from verl_pg_plugin.mixers.convolution import Windows, convolve, plain_convolution
from verl_pg_plugin.mixers.layer_types import MAMBA2, MAMBA2_MODEL_TYPES, layer_types
from verl_pg_plugin.mixers.mixer import Mixer
from verl_pg_plugin.mixers.recurrence import Depth, Depths, run_by_depth

_SINCE = {
    "falcon_h1": ("5.17", "passes no keywords to its layers"),
    "nemotron_h": ("5.15", "adds up the chunks of its scan wrongly on a CPU"),
}
"""The first transformers that runs a model type, and the fault of those before."""


@torch.autocast("cuda", enabled=False)  # verl's autocast would round to bf16
@torch.autocast("cpu", enabled=False)
def scan(
    x_NLHP: Tensor, dt_NLH: Tensor, b_NLGS: Tensor, c_NLGS: Tensor, a_H: Tensor, state_NHPS: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Return the (N, L, H, P) outputs and (N, H, P, S) final states of ``h = exp(a dt) h + dt x b``, ``y = h c``.

    N sequences of L tokens, H heads of P channels and S states. H = G * R: the R heads of a group share b and c. Tokens
    with ``dt`` 0 change no state. Each of C chunks has Q = K = ``size`` tokens, whose pairs are computed at once.
    """
    num_tokens, groups = x_NLHP.shape[1], b_NLGS.shape[2]
    size = min(size, num_tokens)

    def chunked(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0) * (x.ndim - 2) + (0, -num_tokens % size)).unflatten(1, (-1, size))

    x_NCKGRP = chunked(x_NLHP * dt_NLH.unsqueeze(-1)).unflatten(3, (groups, -1))
    b_NCKGS, c_NCQGS = chunked(b_NLGS), chunked(c_NLGS)
    steps_NCGRQ = chunked(dt_NLH * a_H).unflatten(3, (groups, -1)).movedim(2, -1)
    # A sum of the steps between two tokens; a difference of sums from the chunk's start would round more.
    between_NCGRQK = steps_NCGRQ.unsqueeze(-1).expand(*steps_NCGRQ.shape, size).tril(-1).cumsum(-2)
    decay_NCGRQK = between_NCGRQK.exp().tril()
    scores_NCGQK = torch.einsum("ncqgs,nckgs->ncgqk", c_NCQGS, b_NCKGS)
    y_NCQGRP = torch.einsum("ncgrqk,nckgrp->ncqgrp", scores_NCGQK.unsqueeze(3) * decay_NCGRQK, x_NCKGRP)

    to_end_NCKGR = decay_NCGRQK[..., -1, :].movedim(-1, 2)
    added_NCGRPS = torch.einsum("nckgrp,nckgs->ncgrps", x_NCKGRP * to_end_NCKGR.unsqueeze(-1), b_NCKGS)
    from_start_NCGRQ = steps_NCGRQ.cumsum(-1).exp()
    state_NGRPS = torch.zeros_like(added_NCGRPS[:, 0]) if state_NHPS is None else state_NHPS.unflatten(1, (groups, -1))
    starts = []
    for added, kept in zip(added_NCGRPS.unbind(1), from_start_NCGRQ[..., -1].unbind(1), strict=True):
        starts.append(state_NGRPS)
        state_NGRPS = state_NGRPS * kept[..., None, None] + added
    read_NCQGRP = torch.einsum("ncqgs,ncgrps->ncqgrp", c_NCQGS, torch.stack(starts, 1))
    y_NCQGRP = y_NCQGRP + read_NCQGRP * from_start_NCGRQ.movedim(-1, 2).unsqueeze(-1)
    return y_NCQGRP.flatten(3, 4).flatten(1, 2)[:, :num_tokens], state_NGRPS.flatten(1, 2)


@torch.compiler.disable  # index maps differ in every micro-batch
def mix(mixer: Any, context: ForwardContext | None, x_1LD: Tensor, dt_1LH: Tensor) -> Tensor:
    """Return (1, L, H * P), the convolution and the scan within each sequence, float32 or wider; zero at padding.

    ``x_1LD`` has the values, b and c of each token.
    """
    if context is None or context.layout is None:
        raise RuntimeError(f"a packed Mamba2 layer got no layout. Fix: {SHARING_OFF}")
    num_tokens, wide = context.layout.num_tokens, torch.promote_types(x_1LD.dtype, torch.float32)
    windows = context.index(Windows.from_layout, mixer.conv_kernel_size, x_1LD.device)
    plain = partial(plain_convolution, weight=mixer.conv1d.weight.squeeze(1), bias=mixer.conv1d.bias)
    x_TD = mixer.act(convolve(x_1LD[:, :num_tokens].transpose(1, 2), windows, plain)).squeeze(0).T
    of_group = mixer.n_groups * mixer.ssm_state_size
    x_TI, b_TE, c_TE = x_TD.split([mixer.intermediate_size, of_group, of_group], dim=1)
    x_THP = x_TI.unflatten(1, (-1, mixer.head_dim))
    b_TGS, c_TGS = (tensor.unflatten(1, (mixer.n_groups, -1)) for tensor in (b_TE, c_TE))
    dt_TH = F.softplus(dt_1LH[0, :num_tokens].to(wide) + mixer.dt_bias.to(wide)).clamp(*mixer.time_step_limit)
    a_H = -mixer.A_log.to(wide).exp()

    def scan_depth(depth: Depth, part: Any, state: Tensor | None, is_read: bool) -> tuple[Tensor, Tensor]:
        x, dt, b, c = (depth.padded(tensor).to(wide) for tensor in part)
        y, state = scan(x, dt, b, c, a_H, state, mixer.chunk_size)
        return depth.unpadded(y), state

    y_THP = run_by_depth(context.index(Depths.from_layout, x_1LD.device), scan_depth, (x_THP, dt_TH, b_TGS, c_TGS))
    y_THP = y_THP + mixer.D.to(wide).unsqueeze(1) * x_THP
    return F.pad(y_THP.flatten(1), (0, 0, 0, x_1LD.shape[1] - num_tokens)).unsqueeze(0)


def forward(mixer: Any, hidden_states: Tensor, prefix_grouper: ForwardContext | None = None, **kwargs: Any) -> Tensor:
    """Replace the forward of transformers' mixer, (1, L, D) -> (1, L, D); RuntimeError for masks and caches."""
    passed = {name for name, value in kwargs.items() if value is not None and value is not False}
    if unsupported := ", ".join(sorted(passed - WITHOUT_EFFECT)):
        raise RuntimeError(f"packed Mamba2 does not implement {unsupported}; {SHARING_OFF}")
    projected = mixer.in_proj(hidden_states * getattr(mixer, "ssm_in_multiplier", 1.0))
    if hasattr(mixer, "mup_vector"):
        projected = projected * mixer.mup_vector
    gate, x_1LD, dt_1LH = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    y = mix(mixer, prefix_grouper, x_1LD, dt_1LH)
    y = mixer.norm(y, gate) if getattr(mixer, "mamba_rms_norm", True) else y * F.silu(gate)
    assert prefix_grouper is not None  # ``mix`` raises without one
    return mixer.out_proj(prefix_grouper.mixed(MAMBA2, y.to(hidden_states.dtype)))


def install(model: nn.Module) -> None:
    """Make every Mamba2 layer of an unwrapped model mix packed tokens."""
    for module in model.modules():
        if hasattr(module, "A_log") and hasattr(module, "conv1d"):
            module.forward = partial(forward, module)


def obstacles(config: PretrainedConfig) -> list[str]:
    since, fault = _SINCE.get(config.model_type, ("0", ""))
    if Version(transformers.__version__) >= Version(since):
        return []
    return [f"{config.model_type} of transformers before {since} {fault}: pip install 'transformers>={since}'"]


def machine_obstacles(device_name: str) -> list[str]:
    return ["Mamba2 layers have not run on a GPU with shared prefixes"] if device_name == "cuda" else []


def token_flops(config: PretrainedConfig) -> float:
    """FLOPs of the recurrence (not of chunks): one to decay, two each to update and read an element of the state."""
    if config.model_type == "nemotron_h":
        sizes = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
    else:
        sizes = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
    return 5.0 * layer_types(config).count(MAMBA2) * math.prod(sizes)


MIXER = Mixer(
    name=MAMBA2,
    layer_types=frozenset({MAMBA2}),
    obstacles=obstacles,
    machine_obstacles=machine_obstacles,
    install=install,
    token_flops=token_flops,
    stateful_model_types=MAMBA2_MODEL_TYPES,
)
