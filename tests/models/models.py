"""Tiny checkpoints of the shipped model files, and what a batch through them must give."""

import functools
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from prefix_grouper import PrefixGrouper
from verl.trainer.ppo.prefix_grouper_utils import build_position_ids_for_prefix_grouper

from tests.support import VOCAB, Result, group, save_tiny_model
from verl_pg_plugin.cli.patch_model import patch
from verl_pg_plugin.layout import PackedLayout, build_packed_layout
from verl_pg_plugin.synthetic import Sample

SAMPLES = [*group(9, [5, 3, 7], seed=1), *group(1, [4, 1], seed=2), *group(6, [2], seed=3)]
"""Uneven groups, a prompt of one token, a response of one token, a group of one."""


def save_qwen3(path: Path, **overrides: Any) -> str:
    save_tiny_model(path, "qwen3", **overrides)
    patch(path)
    return str(path)


def save_split_llama(path: Path) -> str:
    first = save_tiny_model(path.parent / "first", "llama", seed=1, num_hidden_layers=3)
    last = save_tiny_model(
        path.parent / "last", "llama", seed=2, num_hidden_layers=2, hidden_size=48, head_dim=12, rms_norm_eps=1e-5
    )
    assemble(first, 2, last, 1, path)
    return str(path)


def assemble(first: str | Path, first_layers: int, last: str | Path, last_layers: int, output: Path) -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "assemble_split_llama.py"))
    script["assemble"](Path(first), first_layers, Path(last), last_layers, output)


def load(
    path: str,
    attn_implementation: str = "sdpa",
    auto_class: Any = transformers.AutoModelForCausalLM,
    stock: bool = False,
    **options: Any,
) -> Any:
    """The checkpoint's own class, or transformers'."""
    return auto_class.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attn_implementation, trust_remote_code=not stock, **options
    )


def pad(samples: Sequence[Sample], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, S) token ids and mask; padding holds a genuine token so that nothing can hide behind id 0."""
    rows = [[*s.prompt, *s.response] for s in samples]
    width = max(map(len, rows)) + (side == "both")
    input_ids = torch.full((len(rows), width), 5)
    mask = torch.zeros_like(input_ids)
    for b, row in enumerate(rows):
        start = {"right": 0, "left": width - len(row), "both": (width - len(row)) // 2}[side]
        input_ids[b, start : start + len(row)] = torch.tensor(row)
        mask[b, start : start + len(row)] = 1
    return input_ids, mask


def layout_of(samples: Sequence[Sample]) -> PackedLayout:
    rows = [[*s.prompt, *s.response] for s in samples]
    offsets = np.cumsum([0, *map(len, rows)])
    return build_packed_layout(np.concatenate(rows), offsets, np.array([len(s.prompt) for s in samples]))


LAYOUT = layout_of(SAMPLES)


def responses(logits: torch.Tensor, mask: torch.Tensor, samples: Sequence[Sample] = SAMPLES) -> list[torch.Tensor]:
    """Logits in front of every response token out of padded positions."""
    return [row[valid.bool()][len(s.prompt) - 1 : -1] for row, valid, s in zip(logits, mask, samples, strict=True)]


def unpack(logits_1TV: torch.Tensor, layout: PackedLayout, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Logits in front of every response token, by sample, out of packed rows."""
    flat = logits_1TV[0, torch.from_numpy(layout.head_index[layout.response_head]).long()]
    ends = np.cumsum([len(s.prompt) + len(s.response) for s in samples])
    owner = torch.from_numpy(np.searchsorted(ends, layout.response_index, side="right"))
    order = torch.from_numpy(np.argsort(layout.response_index, kind="stable"))
    return [flat[order][owner[order] == b] for b in range(len(samples))]


def result(model: Any, logits: Sequence[torch.Tensor], samples: Sequence[Sample]) -> Result:
    """Log-probs and entropy (or values) of the response tokens, and gradients of a loss that weighs each differently.

    Args:
        logits: per sample, (response length, V) in front of every response token; V is 1 for a value model.
    """
    model.zero_grad()
    if logits[0].shape[-1] == 1:
        outputs = {"values": [rows.squeeze(-1) for rows in logits]}
    else:
        log_p = [rows.log_softmax(-1) for rows in logits]
        labels = [torch.tensor(s.response).unsqueeze(-1) for s in samples]
        outputs = {
            "log_probs": [p.gather(-1, label).squeeze(-1) for p, label in zip(log_p, labels, strict=True)],
            "entropy": [-(p.exp() * p).sum(-1) for p in log_p],
        }
    generator = torch.Generator().manual_seed(7)
    loss = sum((torch.randn(len(row), generator=generator) * row).sum() for rows in outputs.values() for row in rows)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result({name: [row.detach() for row in rows] for name, rows in outputs.items()}, gradients)


def padded(model: Any, side: str = "left") -> Result:
    input_ids, mask = pad(SAMPLES, side)
    logits = model(input_ids, attention_mask=mask).logits
    assert (logits[mask == 0] == 0).all()
    return result(model, responses(logits, mask), SAMPLES)


def packed(model: Any) -> Result:
    assert LAYOUT.num_tokens < LAYOUT.num_logical_tokens
    logits = model(torch.from_numpy(LAYOUT.input_ids).unsqueeze(0), prefix_grouper=LAYOUT).logits
    return result(model, unpack(logits, LAYOUT, SAMPLES), SAMPLES)


def grouped(model: Any) -> Result:
    """Upstream's PrefixGrouper, masks and all."""
    grouper, input_ids, position_ids = upstream_batch(SAMPLES, [3, 2, 1])
    masks = {"attention_mask": grouper.padding_mask, "position_ids": position_ids}
    logits = model(input_ids, prefix_grouper=grouper, **masks).logits
    *_, suffix, suffix_mask = grouper.split_output(logits, include_prefix_last=1)
    return result(model, [row[valid][:-1] for row, valid in zip(suffix, suffix_mask, strict=True)], SAMPLES)


WAYS: dict[str, Callable[[Any], Result]] = {"padded": padded, "packed": packed, "grouped": grouped}


def upstream_batch(samples: list[Sample], group_sizes: list[int]) -> tuple[PrefixGrouper, torch.Tensor, torch.Tensor]:
    """Rows [prompt | response 1 | ... | padding] of whole groups."""
    firsts = [sum(group_sizes[:g]) for g in range(len(group_sizes))]
    prompts, prompt_mask = pad([Sample(samples[i].prompt, []) for i in firsts], "left")
    suffixes, suffix_mask = pad([Sample([], s.response) for s in samples], "right")
    grouper = PrefixGrouper.from_ungrouped_masks(prompt_mask, suffix_mask, group_sizes)
    input_ids = grouper.concat_input(prompts, prompt_mask, suffixes, suffix_mask)
    return grouper, input_ids, build_position_ids_for_prefix_grouper(grouper)


@functools.cache
def reference(path: str, **options: Any) -> Result:
    """Every sequence alone, without padding, through transformers' own attention and, for Qwen3, its class."""
    stock = transformers.AutoConfig.from_pretrained(path, trust_remote_code=True).model_type == "qwen3"
    model = load(path, "eager", stock=stock, **options)
    rows = [
        model(input_ids=torch.tensor([[*s.prompt, *s.response]]), use_cache=False).logits[0, len(s.prompt) - 1 : -1]
        for s in SAMPLES
    ]
    return result(model, rows, SAMPLES)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
