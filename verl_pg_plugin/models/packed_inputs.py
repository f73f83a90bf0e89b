"""Mixins for transformers models that pack their own inputs: the causal model, its attention and a value head.

Shapes: B sequences, S padded length, T packed tokens, L tokens of this rank, V width of the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils import can_return_tuple
from verl.utils.attention_utils import index_first_axis, pad_input, unpad_input
from verl.utils.ulysses import (
    gather_outputs_and_unpad,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
    ulysses_pad_and_slice_inputs,
)

from verl_pg_plugin.attention.context import ForwardContext, PackedAttention, PaddedGroupsAttention
from verl_pg_plugin.attention.interface import ATTENTION_NAME, packed_attention
from verl_pg_plugin.attention.kernels import Kernel, select_kernel
from verl_pg_plugin.layout import PackedLayout

if TYPE_CHECKING:
    from prefix_grouper import PrefixGrouper

NO_MASK: dict[str, None] = {"full_attention": None, "sliding_attention": None}
"""Masks by layer type, in transformers' format for prepared masks; ``prefix_grouper`` replaces them."""

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""Keyword of the KV cache in the installed transformers; ``cache`` since 5.24."""

KERNEL_NAMES = {"flash_attention_2": "flash_attn_2", "sdpa": "sdpa", "eager": "sdpa", ATTENTION_NAME: "auto"}
"""Kernel for packed tokens by the model's ``attn_implementation``."""


@dataclass(frozen=True)
class PackedInputs:
    """Inputs of a decoder, and how to map its output to the caller's positions."""

    input_ids: torch.Tensor | None  # (1, L) packed tokens, or the caller's if nothing is packed
    position_ids: torch.Tensor | None  # of the same shape
    prefix_grouper: ForwardContext | None = None  # replaces the mask; None runs transformers' own attention
    padded: tuple[Any, ...] = ()  # (T,) indices of the tokens in the caller's flattened (B, S), B and S, if padded
    num_sp_padding: int | None = None  # tokens appended for equal slices, if sliced here for Ulysses

    def restore(self, x_1LV: torch.Tensor) -> torch.Tensor:
        """Map (1, L, V) to the caller's positions: (B, S, V), zero at padding, or (1, T, V) for packed tokens.

        Every rank gets all tokens and computes the same loss. verl's gather scales the gradient by the number of
        ranks, over which FSDP averages parameter gradients.
        """
        if self.num_sp_padding is not None:
            x_1LV = gather_outputs_and_unpad(x_1LV, gather_dim=1, unpad_dim=1, padding_size=self.num_sp_padding)
        return pad_input(x_1LV.squeeze(0), *self.padded) if self.padded else x_1LV


def pack_padded(
    config: PretrainedConfig, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor | None
) -> PackedInputs:
    """Remove the padding of (B, S); every sequence becomes one segment, and prefixes are not shared.

    A sequence without valid tokens gives zeros and no gradient. ``position_ids`` are (B, S) or (1, S); by default
    valid tokens are counted from 0.
    """
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)} differ")
    mask = attention_mask.bool()
    if (F.pad(mask.int(), (1, 0)).diff(dim=1) > 0).sum(dim=1).max() > 1:
        raise ValueError(
            "attention_mask has gaps: valid tokens of a sequence must be consecutive; pad on the left or right only"
        )
    if not mask.any():
        raise ValueError("attention_mask masks every token of the batch")
    if position_ids is None:
        position_ids = mask.long().cumsum(dim=1) - 1
    elif position_ids.shape not in (input_ids.shape, (1, input_ids.shape[1])):
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} must have the shape of input_ids {tuple(input_ids.shape)}, or 1 "
            "in place of the batch size; leave them out to count the valid tokens"
        )
    tokens, indices, cu_seqlens, max_seqlen, *_ = unpad_input(input_ids.unsqueeze(-1), mask)
    positions = index_first_axis(position_ids.expand_as(input_ids).reshape(-1, 1), indices)
    cu_seqlens = torch.unique_consecutive(cu_seqlens)  # a sequence of padding only is no segment
    kernel = kernel_of(config._attn_implementation, input_ids.device.type)
    segments = PackedAttention.unshared(kernel, cu_seqlens, int(max_seqlen), len(tokens))
    return _over_ranks(tokens.T, positions.T, segments, (indices, *input_ids.shape))


def shared_inputs(
    config: PretrainedConfig,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    prefix_grouper: PrefixGrouper | PackedLayout | ForwardContext,
) -> PackedInputs:
    """Return the inputs for a ``prefix_grouper``; positions (1, T) default to the layout's."""
    if not isinstance(prefix_grouper, (ForwardContext, PackedLayout)):
        return _padded_groups(config, input_ids, attention_mask, position_ids, prefix_grouper)
    if attention_mask is not None:
        raise ValueError("this prefix_grouper defines which tokens exist: pass attention_mask=None")
    if isinstance(prefix_grouper, ForwardContext):
        if position_ids is None or position_ids.shape != input_ids.shape:
            raise ValueError("a ForwardContext needs position_ids of the shape of input_ids")
        return PackedInputs(input_ids, position_ids, prefix_grouper)
    layout, kernel = prefix_grouper, kernel_of(config._attn_implementation, input_ids.device.type)
    for name, given in (("input_ids", input_ids), ("position_ids", position_ids)):
        if given is not None and given.shape != (1, layout.num_tokens):
            raise ValueError(f"prefix_grouper has {layout.num_tokens} tokens, but {name} is {tuple(given.shape)}")
    if position_ids is None:
        position_ids = torch.from_numpy(layout.position_ids).to(input_ids.device).unsqueeze(0)
    return _over_ranks(input_ids, position_ids, PackedAttention(layout, kernel))


def _padded_groups(
    config: PretrainedConfig,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    grouper: PrefixGrouper,
) -> PackedInputs:
    """Return (B, S) inputs of verl's own grouper: one group ``[prompt | response 1 | ... | padding]`` for each row."""
    from prefix_grouper import PrefixGrouper  # only this mode needs the package

    if not isinstance(grouper, PrefixGrouper):
        name = type(grouper).__qualname__
        raise TypeError(f"prefix_grouper must be a PrefixGrouper, PackedLayout or ForwardContext, not {name}")
    padding_mask = grouper.padding_mask
    if input_ids.shape != padding_mask.shape:
        raise ValueError(
            f"prefix_grouper describes {padding_mask.shape[0]} groups of up to {padding_mask.shape[1]} tokens, but "
            f"input_ids is {tuple(input_ids.shape)}; make input_ids with prefix_grouper.concat_input"
        )
    if attention_mask is not None and not torch.equal(attention_mask.bool(), padding_mask.to(attention_mask.device)):
        raise ValueError("attention_mask differs from prefix_grouper.padding_mask: group sizes do not match the batch")
    if position_ids is None or position_ids.shape != input_ids.shape:
        raise ValueError(
            "a PrefixGrouper needs position_ids of the shape of input_ids; make them with "
            "verl.trainer.ppo.prefix_grouper_utils.build_position_ids_for_prefix_grouper"
        )
    if get_ulysses_sequence_parallel_world_size() > 1:
        raise ValueError(
            "a PrefixGrouper's padded groups do not support Ulysses; pass a PackedLayout (use_remove_padding=True) or "
            "set ulysses_sequence_parallel_size=1"
        )
    kernel = kernel_of(config._attn_implementation, input_ids.device.type)
    return PackedInputs(input_ids, position_ids, PaddedGroupsAttention(grouper, kernel))


@cache  # select_kernel reads package metadata
def kernel_of(implementation: str, device_type: str) -> Kernel:
    if implementation not in KERNEL_NAMES:
        raise ValueError(
            f"packed tokens have no kernel for attn_implementation={implementation!r}; load the model with one of "
            f"{', '.join(KERNEL_NAMES)}"
        )
    return select_kernel(KERNEL_NAMES[implementation], device_type)


def _over_ranks(
    input_ids: torch.Tensor, position_ids: torch.Tensor, context: ForwardContext, padded: tuple[Any, ...] = ()
) -> PackedInputs:
    """Pad (1, T) tokens to a multiple of verl's Ulysses group and keep this rank's slice, if there is a group."""
    sp_size, num_padding = get_ulysses_sequence_parallel_world_size(), None
    if sp_size > 1:
        context.group = get_ulysses_sequence_parallel_group()
        input_ids, position_ids, num_padding = ulysses_pad_and_slice_inputs(input_ids, position_ids, sp_size)
    return PackedInputs(input_ids, position_ids, context, padded, num_padding)


class PackedAttentionMixin(nn.Module):
    """Mixin for transformers' attention of Llama or Qwen3: with a ``prefix_grouper``, attend over shared prefixes."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        prefix_grouper: ForwardContext | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (B, T, hidden size) and, without a grouper, transformers' attention weights."""
        if prefix_grouper is None:
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        by_head = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (project(hidden_states).view(by_head) for project in projections)
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        options = {"scaling": self.scaling, "sliding_window": getattr(self, "sliding_window", None), **kwargs}
        if self.training:
            options["dropout"] = self.attention_dropout
        out, _ = packed_attention(self, query, key, value.transpose(1, 2), attention_mask, prefix_grouper, **options)
        return self.o_proj(out.flatten(2)), None


class PackedInputsMixin:
    """Mixin for a ``PreTrainedModel`` with a decoder ``model`` and a language-model head.

    The decoder must pass ``prefix_grouper`` to its attention layers and accept ``NO_MASK`` as mask.
    """

    config: Any
    model: Any
    loss_function: Any

    def _init_head(self, config: Any) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def _forward_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        prefix_grouper: PrefixGrouper | PackedLayout | ForwardContext | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits (values, for a value model). B sequences, S padded length, T packed tokens.

        A 2-D ``attention_mask`` without a cache packs the batch: the decoder and the head run on valid tokens only,
        sliced for verl's Ulysses group if there is one. With a cache, ``inputs_embeds`` or another mask, the forward
        is transformers' own.

        Args:
            input_ids: (B, S), or (1, T) tokens of a layout.
            attention_mask: (B, S), 1 at valid tokens, which are consecutive.
            position_ids: like ``input_ids``; by default from the mask or the layout.
            logits_to_keep: the last n positions, or indices of positions; 0 for all.
            prefix_grouper: computes shared prefixes once. ``prefix_grouper.PrefixGrouper``: padded rows of whole
                groups. ``PackedLayout``: packed tokens. ``ForwardContext``: tokens as prepared by the caller.
            cache: name of ``past_key_values`` since transformers 5.24.

        Returns:
            ``logits`` (B, S, V) at the caller's positions, zero at padding; (1, T, V) for packed tokens.
        """
        past_key_values = cache if past_key_values is None else past_key_values
        cached = bool(use_cache) or past_key_values is not None
        if prefix_grouper is not None:
            if cached:
                raise ValueError("use_cache=True with a prefix_grouper: shared prefixes are for training; drop one")
            if input_ids is None:
                raise ValueError("a prefix_grouper needs input_ids; inputs_embeds are not supported")
            inputs = shared_inputs(self.config, input_ids, attention_mask, position_ids, prefix_grouper)
        elif attention_mask is not None and attention_mask.ndim == 2 and input_ids is not None and not cached:
            inputs = pack_padded(self.config, input_ids, attention_mask, position_ids)
        else:
            inputs = PackedInputs(input_ids, position_ids)
        if inputs.prefix_grouper is not None:
            use_cache = False
            names = ("output_attentions", "output_hidden_states")
            if requested := [name for name in names if kwargs.get(name, getattr(self.config, name))]:
                raise ValueError(f"{' and '.join(requested)} would be in packed order; use_cache=True does not pack")

        outputs = self.model(
            input_ids=inputs.input_ids,
            attention_mask=attention_mask if inputs.prefix_grouper is None else NO_MASK,
            position_ids=inputs.position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            prefix_grouper=inputs.prefix_grouper,
            **{CACHE: past_key_values, **kwargs},
        )
        if isinstance(logits_to_keep, int) and logits_to_keep == 0:
            logits = inputs.restore(self._forward_head(outputs.last_hidden_state))
        else:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self._forward_head(inputs.restore(outputs.last_hidden_state)[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        rest = {name: getattr(outputs, name) for name in ("hidden_states", "attentions", CACHE)}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **rest)


class ValueHeadMixin:
    """Mixin before ``PackedInputsMixin``: a head of one value per token replaces the LM head."""

    def _init_head(self, config: Any) -> None:
        self.score = nn.Linear(config.hidden_size, 1)
        self._tied_weights_keys = None  # no LM head that shares the embedding's weight

    def _forward_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.score(hidden_states)
