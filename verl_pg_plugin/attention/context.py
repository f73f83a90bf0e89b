"""The context of one forward, which transformers passes to every layer as the keyword ``prefix_grouper``."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from verl.utils.attention_utils import pad_input, unpad_input
from verl.utils.ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads

from verl_pg_plugin.attention.cache import CacheAccess
from verl_pg_plugin.attention.kernels import Kernel
from verl_pg_plugin.attention.op import AttentionOptions, AttentionRecord, attend
from verl_pg_plugin.attention.passes import Varlen
from verl_pg_plugin.attention.plan import AttentionPlan, VarlenCall
from verl_pg_plugin.layout import PackedLayout

if TYPE_CHECKING:
    from prefix_grouper import PrefixGrouper


class ForwardContext(ABC):
    """State of one forward for its layers; recomputation of a checkpointed layer reads it again.

    No dataclass: torch 2.11 unpacks those that compiled code passes on, and recompiles for every tensor size in them.

    Attributes:
        layout: the packed tokens; None for padded groups, and if the model packed a padded batch itself.
        kernel: the attention kernel.
        cache: access to the prefix cache; None outside of split groups.
        group: ranks that hold an equal slice of the tokens each (Ulysses); None if this rank has them all.
        checkpoint: runs a decoder layer under an activation checkpoint (``engine.activations``); None for none.
        perturb: applied to the output of every mixer; verify mode measures rounding with it.
        record: record of the checkpointed layer that this copy of the context is for; None in a model's context.
        calls: number of mixer calls by name. The engine compares it with the model, so a layer that bypasses the plugin
            is an error.
        index: ``index(make, *args)`` returns ``make(layout, *args)``, computed once per forward.
    """

    def __init__(
        self,
        layout: PackedLayout | None,
        kernel: Kernel,
        cache: CacheAccess | None = None,
        group: dist.ProcessGroup | None = None,
        checkpoint: Callable[..., Any] | None = None,
        perturb: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.layout, self.kernel, self.cache, self.group = layout, kernel, cache, group
        self.checkpoint, self.perturb = checkpoint, perturb
        self.record: AttentionRecord | None = None
        self.calls: Counter[str] = Counter()
        self.index = functools.cache(lambda make, *args: make(layout, *args))

    def with_record(self, record: AttentionRecord) -> ForwardContext:
        """Return a shallow copy for one checkpointed layer."""
        own = copy.copy(self)
        own.record = record
        return own

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Compute causal attention within each sequence.

        Takes (B, H, T, D) queries and (B, G, T, D) keys with the rotary embedding applied, and values, which may be
        narrower. Returns (B, T, H, D) in the dtype of ``query`` and the width of ``value``.
        """

    def to_heads(self, x: Tensor) -> Tensor:
        """All-to-all from (1, L, H, ...), this rank's tokens, to (1, T, H / ranks, ...), this rank's heads."""
        return x if self.group is None else gather_seq_scatter_heads(x, seq_dim=1, head_dim=2, group=self.group)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Inverse of ``to_heads``."""
        return x if self.group is None else gather_heads_scatter_seq(x, head_dim=2, seq_dim=1, group=self.group)

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's heads of a parameter (H, ...)."""
        if self.group is None:
            return x
        return x.tensor_split(dist.get_world_size(self.group))[dist.get_rank(self.group)]

    def mixed(self, mixer: str, out: Tensor) -> Tensor:
        """Count a mixer call and return its output."""
        self.calls[mixer] += 1
        return out if self.perturb is None else self.perturb(out)


def heads_obstacle(heads: int, kv_heads: int, ranks: int) -> str:
    """Return why heads cannot be divided over Ulysses ranks (a key/value head may be copied), or '' if they can."""
    if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        return ""
    return f"{heads} query and {kv_heads} key/value heads cannot be spread over {ranks} ranks"


class PackedAttention(ForwardContext):
    """Attention over T packed tokens, all on this rank or an equal slice on each rank of a group.

    With a group, all-to-alls around each mixer exchange a slice of the tokens for a slice of the heads and back
    (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).
    """

    _unshared: AttentionPlan | None = None

    @classmethod
    def unshared(cls, kernel: Kernel, cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> PackedAttention:
        """Return a context for ordinary varlen attention over sequences bounded by ``cu_seqlens`` (S+1,) int32."""
        context, tokens = cls(None, kernel), slice(0, num_tokens)
        context._unshared = AttentionPlan(
            [VarlenCall(tokens, tokens, Varlen(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))]
        )
        return context

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See ``ForwardContext.attend``. With a group, a collective; ValueError if heads cannot be divided over it."""
        if self.group is not None:
            ranks, num_kv_heads = dist.get_world_size(self.group), key.shape[1]
            if why := heads_obstacle(query.shape[1], num_kv_heads, ranks):
                raise ValueError(f"{why}. Fix: set ulysses_sequence_parallel_size to a divisor of both")
            if (repeats := ranks // num_kv_heads) > 1:  # every rank needs a key/value head
                key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
            if options.sinks is not None:
                options = replace(options, sinks=self.own_heads(options.sinks))
        q_THD, k_TGD, v_TGD = (self.to_heads(x.transpose(1, 2)).squeeze(0) for x in (query, key, value))
        return self.to_tokens(self.attend_packed(q_THD, k_TGD, v_TGD, options).unsqueeze(0))

    def attend_packed(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, options: AttentionOptions) -> Tensor:
        """Return (T, H, D) for (T, H, D) queries and (T, G, D) keys and values; zero at padding."""
        plan = self._plan(q_THD.device, options.window_size)
        num_tokens = plan.forward[-1].rows.stop
        num_padding = len(q_THD) - num_tokens
        if num_padding:
            q_THD, k_TGD, v_TGD = (x[:num_tokens] for x in (q_THD, k_TGD, v_TGD))
        out_THD = attend(q_THD, k_TGD, v_TGD, plan, self.kernel, options, self.cache, self.record)
        return F.pad(out_THD, (0, 0, 0, 0, 0, num_padding)) if num_padding else out_THD

    def _plan(self, device: torch.device, window: int) -> AttentionPlan:
        """Return the attention plan of layers with this window."""
        if self._unshared is not None:
            return self._unshared
        assert isinstance(self.layout, PackedLayout)
        if window >= np.diff(self.layout.cu_seqlens_k).max() - 1:
            window = -1
        return self.index(AttentionPlan.of, device, window)


class PaddedGroupsAttention(ForwardContext):
    """Attention over padded groups ``[prompt | response 1 | ... | padding]`` (github.com/johncaged/PrefixGrouper)."""

    def __init__(self, grouper: PrefixGrouper, kernel: Kernel, **options: Any) -> None:
        super().__init__(None, kernel, **options)
        self.grouper = grouper

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Run upstream's two passes: prefixes, then responses over prefix and response."""

        def attend_padded(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, mask_BK: Tensor) -> Tensor:
            # The queries are the last of their keys' tokens.
            batch_size, num_q = q_BHQD.shape[0], q_BHQD.shape[2]
            q_THD, rows, cu_seqlens_q, max_seqlen_q, *_ = unpad_input(q_BHQD.transpose(1, 2), mask_BK[:, -num_q:])
            k_TGD, _, cu_seqlens_k, max_seqlen_k, *_ = unpad_input(k_BGKD.transpose(1, 2), mask_BK)
            v_TGD, *_ = unpad_input(v_BGKD.transpose(1, 2), mask_BK)
            if not len(q_THD):  # no group of the batch has a prefix
                return q_BHQD[..., : v_BGKD.shape[-1]].transpose(1, 2)
            # Groups without a prefix are dropped; every suffix has tokens.
            cu_seqlens_q, cu_seqlens_k = torch.unique_consecutive(cu_seqlens_q), torch.unique_consecutive(cu_seqlens_k)
            tokens = slice(0, len(q_THD)), slice(0, len(k_TGD))
            plan = AttentionPlan([VarlenCall(*tokens, Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))])
            out_THD = attend(q_THD, k_TGD, v_TGD, plan, self.kernel, options, record=self.record)
            return pad_input(out_THD, rows, batch_size, num_q)

        return self.grouper.forward(attend_padded, query, key, value)
