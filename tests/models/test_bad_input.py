"""Inputs that contradict each other stop with one message that names the cause and the fix."""

from typing import Any

import pytest
import torch
from prefix_grouper import PrefixGrouper

from tests.models.models import LAYOUT, load, random_ids
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.kernels import select_kernel

IDS = random_ids(2, 6)
ONES = torch.ones(2, 6, dtype=torch.long)
GROUPER = PrefixGrouper([[2, 2, 1], [3, 2]], device="cpu")  # (2 groups, 5 tokens)
ROWS = torch.from_numpy(LAYOUT.input_ids).unsqueeze(0)
PREPARED = PackedAttention(LAYOUT, select_kernel("sdpa", "cpu"))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]] * 2)}, "holes"),
        ({"attention_mask": torch.zeros(2, 6)}, "masks every token"),
        ({"attention_mask": torch.ones(2, 7)}, r"attention_mask \(2, 7\) and input_ids \(2, 6\) differ"),
        ({"attention_mask": ONES, "position_ids": torch.arange(5).expand(2, 5)}, r"position_ids \(2, 5\)"),
        ({"attention_mask": ONES, "position_ids": torch.arange(6).expand(3, 2, 6)}, r"position_ids \(3, 2, 6\)"),
        ({"attention_mask": ONES, "output_hidden_states": True}, "output_hidden_states would be in packed order"),
        ({"prefix_grouper": GROUPER}, r"2 groups of up to 5 tokens, but input_ids is \(2, 6\)"),
        ({"input_ids": IDS[:, :5], "prefix_grouper": GROUPER}, "needs position_ids"),
        (
            {"input_ids": IDS[:, :5], "attention_mask": torch.ones(2, 4), "prefix_grouper": GROUPER},
            "group sizes do not match the batch",
        ),
        (
            {"input_ids": IDS[:, :5], "attention_mask": 1 - torch.eye(2, 5).int(), "prefix_grouper": GROUPER},
            "group sizes do not match the batch",
        ),
        ({"prefix_grouper": LAYOUT}, rf"lays out {LAYOUT.num_tokens} tokens, but input_ids is \(2, 6\)"),
        ({"input_ids": ROWS, "position_ids": ROWS[:, 1:], "prefix_grouper": LAYOUT}, "but position_ids is"),
        ({"input_ids": ROWS, "attention_mask": ROWS, "prefix_grouper": LAYOUT}, "says which tokens exist"),
        ({"input_ids": ROWS, "prefix_grouper": PREPARED}, "prepared tokens need position_ids"),
        ({"input_ids": ROWS, "prefix_grouper": LAYOUT, "use_cache": True}, "use_cache=True with a prefix_grouper"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 2, 32), "prefix_grouper": LAYOUT}, "needs input_ids"),
        ({"prefix_grouper": [[2, 2, 1]]}, "prefix_grouper must be a PrefixGrouper, PackedLayout"),
    ],
)
def test_contradicting_inputs_are_rejected(checkpoint: str, inputs: dict[str, Any], message: str) -> None:
    model = load(checkpoint)
    with pytest.raises((ValueError, TypeError), match=message):
        model(**{"input_ids": IDS, **inputs})


def test_attention_dropout_is_rejected_while_training(checkpoint: str) -> None:
    model = load(checkpoint).train()
    for layer in (m for m in model.modules() if hasattr(m, "attention_dropout")):
        layer.attention_dropout = 0.1
    with pytest.raises(RuntimeError, match=r"attention dropout 0\.1"):
        model(IDS, attention_mask=ONES)
    position_ids = torch.arange(5).expand(2, 5)
    with pytest.raises(RuntimeError, match=r"attention dropout 0\.1"):
        model(IDS[:, :5], position_ids=position_ids, prefix_grouper=GROUPER)


def test_an_attention_implementation_without_a_kernel_is_named(qwen3: str) -> None:
    model = load(qwen3, attn_implementation="flex_attention")
    with pytest.raises(ValueError, match="no kernel for attn_implementation='flex_attention'"):
        model(IDS, attention_mask=ONES)
