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

from tests.support import VOCAB, Result, critic_batch, group, learned, run_reference, save_tiny_model
from verl_pg_plugin.cli.patch_model import patch
from verl_pg_plugin.engine.batch import read_sequences
from verl_pg_plugin.synthetic import Sample, make_batch

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


def load(path: str, attention: str = "sdpa", kind: str = "CausalLM", stock: bool = False, **options: Any) -> Any:
    """The checkpoint's own class, or transformers'."""
    options |= {"dtype": torch.float32, "attn_implementation": attention, "trust_remote_code": not stock}
    return getattr(transformers, f"AutoModelFor{kind}").from_pretrained(path, **options)


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


LAYOUT = read_sequences(make_batch(SAMPLES)).lay_out()


def unpack(logits_1TV: torch.Tensor) -> list[torch.Tensor]:
    """Logits in front of every response token, by sample, out of packed rows."""
    flat = logits_1TV[0, torch.from_numpy(LAYOUT.head_index[LAYOUT.response_head]).long()]
    order = torch.from_numpy(np.argsort(LAYOUT.response_index, kind="stable"))
    return list(flat[order].split([len(s.response) for s in SAMPLES]))


def result(model: Any, logits: Sequence[torch.Tensor]) -> Result:
    """What verl's losses learn from logits in front of every response token, by sample; (n, 1) of them are values."""
    model.zero_grad()
    rows: dict[str, list[torch.Tensor]] = {}
    for sample, of_sample in zip(SAMPLES, logits, strict=True):
        if of_sample.shape[-1] == 1:
            outputs = {"values": of_sample.squeeze(-1)}
        else:
            log_p, labels = of_sample.log_softmax(-1), torch.tensor(sample.response).unsqueeze(-1)
            outputs = {"log_probs": log_p.gather(-1, labels).squeeze(-1), "entropy": -(log_p.exp() * log_p).sum(-1)}
        for name, values in outputs.items():
            rows.setdefault(name, []).append(torch.nn.functional.pad(values, (len(sample.prompt) - 1, 1)))
    return learned(model, rows, critic_batch(SAMPLES) if "values" in rows else make_batch(SAMPLES))


def padded(model: Any, side: str = "left") -> Result:
    input_ids, mask = pad(SAMPLES, side)
    logits = model(input_ids, attention_mask=mask).logits
    assert (logits[mask == 0] == 0).all()
    rows = zip(logits, mask.bool(), SAMPLES, strict=True)
    return result(model, [row[valid][len(s.prompt) - 1 : -1] for row, valid, s in rows])


def packed(model: Any) -> Result:
    assert LAYOUT.num_tokens < LAYOUT.num_logical_tokens
    return result(model, unpack(model(torch.from_numpy(LAYOUT.input_ids).unsqueeze(0), prefix_grouper=LAYOUT).logits))


def grouped(model: Any) -> Result:
    """Upstream's PrefixGrouper, masks and all: rows [prompt | response 1 | ... | padding] of whole groups."""
    prompts, prompt_mask = pad([Sample(SAMPLES[first].prompt, []) for first in (0, 3, 5)], "left")
    suffixes, suffix_mask = pad([Sample([], s.response) for s in SAMPLES], "right")
    grouper = PrefixGrouper.from_ungrouped_masks(prompt_mask, suffix_mask, [3, 2, 1])
    input_ids = grouper.concat_input(prompts, prompt_mask, suffixes, suffix_mask)
    masks = {"attention_mask": grouper.padding_mask, "position_ids": build_position_ids_for_prefix_grouper(grouper)}
    logits = model(input_ids, prefix_grouper=grouper, **masks).logits
    *_, suffix, suffix_mask = grouper.split_output(logits, include_prefix_last=1)
    return result(model, [row[valid][:-1] for row, valid in zip(suffix, suffix_mask, strict=True)])


WAYS: dict[str, Callable[[Any], Result]] = {"padded": padded, "packed": packed, "grouped": grouped}


@functools.cache
def reference(path: str, critic: bool = False) -> Result:
    """Every sequence alone, without padding, through transformers' own attention and, for Qwen3, its class."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=True)
    options = {} if config.model_type == "qwen3" else {"trust_remote_code": True}
    return run_reference(path, critic_batch(SAMPLES) if critic else make_batch(SAMPLES), **options)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
