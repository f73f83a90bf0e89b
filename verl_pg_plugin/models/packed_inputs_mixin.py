"""``forward`` of a model that packs its inputs by itself, for any trunk and any head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from verl_pg_plugin.attention.context import AttentionContext
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.models.packed_inputs import NO_MASK, TrunkInputs, pack_padded, use_layout, use_padded_groups

if TYPE_CHECKING:
    from typing import TypeAlias

    from prefix_grouper import PrefixGrouper

    PrefixGrouperLike: TypeAlias = PrefixGrouper | PackedLayout | AttentionContext


class PackedInputsMixin:
    """Mixin for a ``PreTrainedModel`` with a trunk ``model`` and a head behind ``_forward_head``.

    The trunk must pass ``prefix_grouper`` down to its attention layers and take ``NO_MASK`` for its mask.
    """

    config: Any
    model: Any
    loss_function: Any
    _forward_head: Any

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
        prefix_grouper: PrefixGrouperLike | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits (values, for a value model). B sequences, S padded length, T packed rows.

        A 2-D ``attention_mask`` without a cache packs the batch: the trunk and the head run on valid tokens only,
        spread over verl's Ulysses group where one is set. With a cache, ``inputs_embeds`` or a mask of another rank
        the forward is transformers' own.

        Args:
            input_ids: (B, S), or (1, T) rows of a layout.
            attention_mask: (B, S), 1 at valid tokens; valid tokens are consecutive.
            position_ids: like ``input_ids``; derived from the mask or the layout if left out.
            past_key_values, inputs_embeds, labels: as in transformers.
            use_cache: None asks for no cache when the batch is packed.
            logits_to_keep: as in transformers: the last n positions, or indices of positions; 0 for all.
            prefix_grouper: computes shared prefixes once. ``prefix_grouper.PrefixGrouper``: padded rows of whole
                groups. ``PackedLayout``: packed rows. ``AttentionContext``: rows (or this rank's slice of them) that the
                caller prepared; they are run as they are.

        Returns:
            ``logits`` (B, S, V) on the caller's positions, zero at padding; (1, T, V) for packed rows.

        Raises:
            ValueError: mask, positions, grouper, cache or options that contradict each other.
            TypeError: ``prefix_grouper`` is of another type.
        """
        cached = bool(use_cache) or past_key_values is not None
        if prefix_grouper is not None:
            if cached:
                raise ValueError("use_cache=True with a prefix_grouper: shared prefixes are for training; drop one")
            if input_ids is None:
                raise ValueError("a prefix_grouper needs input_ids; inputs_embeds are not supported")
            inputs = self._group(input_ids, attention_mask, position_ids, prefix_grouper)
        elif attention_mask is not None and attention_mask.ndim == 2 and input_ids is not None and not cached:
            inputs = pack_padded(self.config, input_ids, attention_mask, position_ids)
        else:
            inputs = TrunkInputs(input_ids, position_ids, attention_mask)
        if inputs.prefix_grouper is not None:
            use_cache = False
            self._check_outputs(kwargs)

        outputs = self.model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            prefix_grouper=inputs.prefix_grouper,
            **kwargs,
        )
        if isinstance(logits_to_keep, int) and logits_to_keep == 0:
            logits = inputs.restore(self._forward_head(outputs.last_hidden_state))
        else:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self._forward_head(inputs.restore(outputs.last_hidden_state)[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _group(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        prefix_grouper: PrefixGrouperLike,
    ) -> TrunkInputs:
        prepared = isinstance(prefix_grouper, AttentionContext)
        if (prepared or isinstance(prefix_grouper, PackedLayout)) and attention_mask is not None:
            raise ValueError("this prefix_grouper says which rows exist: pass attention_mask=None with it")
        if isinstance(prefix_grouper, PackedLayout):
            return use_layout(self.config, input_ids, position_ids, prefix_grouper)
        if prepared:
            if position_ids is None or position_ids.shape != input_ids.shape:
                raise ValueError("prepared rows need position_ids of the shape of input_ids")
            return TrunkInputs(input_ids, position_ids, NO_MASK, prefix_grouper)
        from prefix_grouper import PrefixGrouper  # needed by this mode alone

        if not isinstance(prefix_grouper, PrefixGrouper):
            raise TypeError(
                "prefix_grouper must be a PrefixGrouper, PackedLayout or AttentionContext, not "
                f"{type(prefix_grouper).__qualname__}"
            )
        return use_padded_groups(self.config, input_ids, attention_mask, position_ids, prefix_grouper)

    def _check_outputs(self, kwargs: dict[str, Any]) -> None:
        names = ("output_attentions", "output_hidden_states")
        asked = [name for name in names if kwargs.get(name, getattr(self.config, name))]
        if asked:
            raise ValueError(
                f"{' and '.join(asked)} would be in packed order, which no caller can read; "
                "ask with use_cache=True, which does not pack"
            )
