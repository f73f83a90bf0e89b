"""The shipped model files alone, under verl's engine and on ranks, compared with one sequence at a time."""

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from assemble_split_llama import assemble
from benchmarks.batches import Sample, make_batch
from prefix_grouper import PrefixGrouper
from torch.distributed.fsdp import FSDPModule
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from verl.trainer.ppo.prefix_grouper_utils import build_position_ids_for_prefix_grouper
from verl.utils import ulysses

from tests import support
from tests.engine.ranks import on_ranks
from tests.support import Result, assert_same, check_exact, critic_batch, group, make_engine, save_tiny_model
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.interface import ATTENTION, ATTENTION_NAME
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.cli.patch_model import patch
from verl_pg_plugin.engine.batch import read_sequences

SAMPLES = [*group(9, [5, 3, 7], seed=1), *group(1, [4, 1], seed=2), *group(6, [2], seed=3)]
"""Uneven groups, a prompt of one token, a response of one token, a group of one."""


def save_qwen3(path: Path, **overrides: Any) -> str:
    save_tiny_model(path, "qwen3", **overrides)
    patch(path)
    return str(path)


def save_llama(path: Path, **overrides: Any) -> Path:
    return Path(save_tiny_model(path, "llama", **overrides))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def split_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("split_llama")
    first = save_llama(folder / "first", seed=1, num_hidden_layers=3)
    other = {"num_hidden_layers": 2, "hidden_size": 48, "head_dim": 12, "rms_norm_eps": 1e-5}
    assemble(first, 2, save_llama(folder / "last", seed=2, **other), 1, folder / "model")
    return str(folder / "model")


@pytest.fixture(params=["qwen3", "split_llama"])
def checkpoint(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def load(path: str, attention: str = "sdpa", kind: str = "CausalLM", stock: bool = False, **options: Any) -> Any:
    """The checkpoint's own class, or transformers'."""
    options |= {"dtype": torch.float32, "attn_implementation": attention, "trust_remote_code": not stock}
    return getattr(transformers, f"AutoModelFor{kind}").from_pretrained(path, **options)


loaded = functools.cache(load)
"""For tests that leave the model as it is."""


def pad(samples: Sequence[Sample], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, S) token ids and mask; padding is a real token, so that id 0 hides no error."""
    rows = [[*s.prompt, *s.response] for s in samples]
    width = max(map(len, rows)) + (side == "both")
    input_ids = torch.full((len(rows), width), 5)
    mask = torch.zeros_like(input_ids)
    for b, row in enumerate(rows):
        start = {"right": 0, "left": width - len(row), "both": (width - len(row)) // 2}[side]
        input_ids[b, start : start + len(row)] = torch.tensor(row)
        mask[b, start : start + len(row)] = 1
    return input_ids, mask


LAYOUT = read_sequences(make_batch(SAMPLES)).build_layout()


def unpack(logits_1TV: torch.Tensor) -> list[torch.Tensor]:
    """Split packed logits into those that predict response tokens, by sample."""
    flat = logits_1TV[0, torch.from_numpy(LAYOUT.head_index[LAYOUT.response_head]).long()]
    order = torch.from_numpy(np.argsort(LAYOUT.response_index, kind="stable"))
    return list(flat[order].split([len(s.response) for s in SAMPLES]))


def result(model: Any, logits: Sequence[torch.Tensor]) -> Result:
    """Return what verl's losses read from logits that predict response tokens, by sample; (n, 1) are values."""
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
    return support.learned(model, rows, critic_batch(SAMPLES) if "values" in rows else make_batch(SAMPLES))


def padded(model: Any, side: str = "left") -> Result:
    input_ids, mask = pad(SAMPLES, side)
    logits = model(input_ids, attention_mask=mask).logits
    assert (logits[mask == 0] == 0).all()
    rows = zip(logits, mask.bool(), SAMPLES, strict=True)
    return result(model, [row[valid][len(s.prompt) - 1 : -1] for row, valid, s in rows])


def packed(model: Any) -> Result:
    assert LAYOUT.num_tokens < LAYOUT.num_total_tokens
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
    return support.run_reference(path, critic_batch(SAMPLES) if critic else make_batch(SAMPLES), **options)


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, support.VOCAB, shape, generator=torch.Generator().manual_seed(0))


def test_padded_batches_match_single_sequences(checkpoint: str) -> None:
    for side, attention in ("right", "eager"), ("both", ATTENTION_NAME), ("both", "sdpa"):
        assert_same(padded(load(checkpoint, attention).train(), side), reference(checkpoint))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_packing_matches_single_sequences(checkpoint: str, way: str) -> None:
    model = load(checkpoint).train()
    assert_same(WAYS[way](model), reference(checkpoint))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(WAYS[way](model), reference(checkpoint))


def test_sliding_windows_are_exact_in_every_way_of_packing(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    model = load(path).train()
    for way in WAYS.values():
        assert_same(way(model), reference(path))


def test_value_models_load_token_classifiers_exactly(tmp_path: Path, checkpoint: str) -> None:
    torch.manual_seed(0)  # of the new head
    stock = "qwen3" in checkpoint
    load(checkpoint, kind="TokenClassification", stock=stock, num_labels=1).save_pretrained(tmp_path)
    if stock:
        shutil.copy(Path(checkpoint) / "modeling_qwen3.py", tmp_path)
    model = load(str(tmp_path), kind="TokenClassification").train()
    assert type(model).__name__.endswith("ForValue")
    for way in (padded, packed):
        assert_same(way(model), reference(str(tmp_path), critic=True))


def test_logits_to_keep_selects_padded_positions(checkpoint: str) -> None:
    model, (input_ids, mask) = loaded(checkpoint), pad(SAMPLES, "left")
    every = model(input_ids, attention_mask=mask).logits
    for keep, positions in (1, slice(-1, None)), (3, slice(-3, None)), (torch.tensor([2, 5]), [2, 5]):
        kept = model(input_ids, attention_mask=mask, logits_to_keep=keep).logits
        valid = mask[:, positions].bool()
        torch.testing.assert_close(kept[valid], every[:, positions][valid], rtol=1e-5, atol=1e-5)


def test_generation_is_the_same_with_and_without_a_cache(checkpoint: str) -> None:
    model = loaded(checkpoint)
    input_ids, mask = pad([Sample(SAMPLES[first].prompt, []) for first in (0, 3, 5)], "left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached = model.generate(input_ids, use_cache=True, **options)
    assert torch.equal(cached, model.generate(input_ids, use_cache=False, **options))
    if model.config.model_type == "qwen3":
        assert torch.equal(cached, load(checkpoint, stock=True).generate(input_ids, **options))


def test_padding_is_zero_short_rows_match_and_position_ids_are_used(checkpoint: str) -> None:
    model, input_ids = load(checkpoint), random_ids(6, 3)
    mask = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 0, 1], [1, 1, 1], [0, 1, 0], [0, 0, 0]])
    logits = model(input_ids, attention_mask=mask).logits
    for b, row in enumerate(mask.bool()):
        if row.any():
            alone = model(input_ids[b][row].unsqueeze(0), use_cache=False).logits[0]
            torch.testing.assert_close(logits[b][row], alone, rtol=1e-5, atol=1e-5)
        else:
            assert (logits[b] == 0).all()
    (torch.nn.functional.cross_entropy(logits[1], input_ids[1], reduction="none") * mask[1]).sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())
    input_ids = random_ids(2, 7)
    position_ids, causal = torch.tensor([[0, 1, 2, 10, 11, 30, 31]]), torch.ones(1, 1, 7, 7).tril().bool()
    alone = [model(row[None], attention_mask=causal, position_ids=position_ids).logits for row in input_ids]
    got = model(input_ids, attention_mask=torch.ones_like(input_ids), position_ids=position_ids).logits
    torch.testing.assert_close(got, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_labels_give_the_loss_of_transformers(qwen3: str) -> None:
    input_ids, mask = pad(SAMPLES, "right")
    labels = input_ids.masked_fill(mask == 0, -100)
    inputs = {"attention_mask": mask, "labels": labels, "num_items_in_batch": 7, "output_hidden_states": False}
    expected = load(qwen3, stock=True)(input_ids, use_cache=False, **inputs).loss
    torch.testing.assert_close(load(qwen3)(input_ids, **inputs).loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_two_halves_of_one_llama_with_an_identity_adapter_equal_it(tmp_path: Path, tied: bool) -> None:
    source = save_llama(tmp_path / "llama", num_hidden_layers=4, tie_word_embeddings=tied)
    assemble(source, 3, source, 1, tmp_path / "split")
    split, llama = load(str(tmp_path / "split")), load(str(source), stock=True)
    torch.nn.init.eye_(split.model.adapter.weight)
    input_ids = random_ids(2, 9)
    mask = torch.ones_like(input_ids)
    mask[0, :3] = 0
    expected = llama(input_ids, attention_mask=mask, use_cache=False).logits
    for options in ({}, {"use_cache": True}):
        got = split(input_ids, attention_mask=mask, **options).logits
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


def test_sources_that_do_not_fit_are_rejected_without_output(tmp_path: Path) -> None:
    llama, empty = save_llama(tmp_path / "llama"), save_llama(tmp_path / "empty")
    qwen, other = save_qwen3(tmp_path / "qwen"), save_llama(tmp_path / "other", vocab_size=50)
    output = tmp_path / "split"
    (empty / "model.safetensors").unlink()
    for sources, message in (
        ((llama, 1, Path(qwen), 1), "not a Llama checkpoint: model_type is 'qwen3'"),
        ((llama, 3, llama, 1), "has 2 layers, cannot take 3"),
        ((llama, 1, other, 1), "vocab_size is 97 and 50"),
        ((empty, 1, llama, 1), r"no \.safetensors"),
    ):
        with pytest.raises(ValueError, match=message):
            assemble(*sources, output)
    assert not output.exists()
    assemble(llama, 1, llama, 1, output)
    with pytest.raises(FileExistsError):
        assemble(llama, 1, llama, 1, output)


ALSO_MASKED = [*SAMPLES, Sample(range(20, 26), range(5), mask=[1, 1, 0, 0, 1]), *2 * [Sample([5] * 7, [7])]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 on the CPU; on a GPU the engine runs on the GPU")
@pytest.mark.parametrize("mode", ["padded", "rmpad", "prefix_grouper", "packed"])
def test_engine_is_exact_in_every_mode_with_gradients_for_all_weights(checkpoint: str, mode: str) -> None:
    removes_padding, groups_whole = mode in ("rmpad", "packed"), mode == "prefix_grouper"
    # Only fixed micro-batches keep padded groups whole.
    limit = {"micro_batch_size_per_gpu": 4} if groups_whole else {"max_token_len_per_gpu": 60}
    batch = make_batch(ALSO_MASKED, use_remove_padding=removes_padding, use_dynamic_bsz=not groups_whole, **limit)
    engine = make_engine(
        checkpoint,
        packed=mode in ("prefix_grouper", "packed"),
        model={"trust_remote_code": True, "use_remove_padding": removes_padding},
        engine={"use_dynamic_bsz": not groups_whole},
    )
    assert any("transformers_modules" in base.__module__ for base in type(engine.module).__mro__)
    trusted = {"trust_remote_code": True} if "split" in checkpoint else {}  # Qwen3 against transformers' own class
    outcome = check_exact(engine, checkpoint, batch, **trusted)
    trained = {name for name, gradient in outcome.gradients.items() if gradient.abs().max() > 0}
    assert trained == {name for name, _ in engine.module.named_parameters()}
    layers = [m for m in engine.module.modules() if isinstance(m, (LlamaDecoderLayer, Qwen3DecoderLayer))]
    assert len(layers) == engine.module.config.num_hidden_layers
    assert all(isinstance(layer, FSDPModule) for layer in layers), "each layer is gathered separately"


IDS, ONES = random_ids(2, 6), torch.ones(2, 6, dtype=torch.long)
GROUPER = PrefixGrouper([[2, 2, 1], [3, 2]], device="cpu")  # (2 groups, 5 tokens)
GROUPED = {"input_ids": IDS[:, :5], "prefix_grouper": GROUPER}
ROWS = torch.from_numpy(LAYOUT.input_ids).unsqueeze(0)
PREPARED = PackedAttention(LAYOUT, select_kernel("sdpa", "cpu"))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]] * 2)}, "gaps"),
        ({"attention_mask": torch.zeros(2, 6)}, "masks every token"),
        ({"attention_mask": torch.ones(2, 7)}, r"attention_mask \(2, 7\) and input_ids \(2, 6\) differ"),
        ({"attention_mask": ONES, "position_ids": torch.arange(5).expand(2, 5)}, r"position_ids \(2, 5\)"),
        ({"attention_mask": ONES, "position_ids": torch.arange(6).expand(3, 2, 6)}, r"position_ids \(3, 2, 6\)"),
        ({"attention_mask": ONES, "output_hidden_states": True}, "output_hidden_states would be in packed order"),
        ({"prefix_grouper": GROUPER}, r"2 groups of up to 5 tokens, but input_ids is \(2, 6\)"),
        (GROUPED, "needs position_ids"),
        (GROUPED | {"attention_mask": 1 - torch.eye(2, 5).int()}, "group sizes do not match the batch"),
        ({"prefix_grouper": LAYOUT}, rf"has {LAYOUT.num_tokens} tokens, but input_ids is \(2, 6\)"),
        ({"input_ids": ROWS, "position_ids": ROWS[:, 1:], "prefix_grouper": LAYOUT}, "but position_ids is"),
        ({"input_ids": ROWS, "attention_mask": ROWS, "prefix_grouper": LAYOUT}, "defines which tokens exist"),
        ({"input_ids": ROWS, "prefix_grouper": PREPARED}, "ForwardContext needs position_ids"),
        ({"input_ids": ROWS, "prefix_grouper": LAYOUT, "use_cache": True}, "use_cache=True with a prefix_grouper"),
        ({"input_ids": ROWS, "prefix_grouper": LAYOUT, "cache": object()}, "use_cache=True with a prefix_grouper"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 2, 32), "prefix_grouper": LAYOUT}, "needs input_ids"),
        ({"prefix_grouper": [[2, 2, 1]]}, "prefix_grouper must be a PrefixGrouper, PackedLayout"),
    ],
)
def test_contradicting_inputs_are_rejected(checkpoint: str, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        loaded(checkpoint)(**{"input_ids": IDS, **inputs})


def test_dropout_and_unknown_attention_are_rejected(checkpoint: str) -> None:
    model = load(checkpoint).train()
    for layer in (m for m in model.modules() if hasattr(m, "attention_dropout")):
        layer.attention_dropout = 0.1
    grouped_ids = GROUPED | {"position_ids": torch.arange(5).expand(2, 5)}
    for inputs in ({"input_ids": IDS, "attention_mask": ONES}, grouped_ids):
        with pytest.raises(RuntimeError, match=r"attention dropout 0\.1"):
            model(**inputs)
    if "qwen3" in checkpoint:
        with pytest.raises(ValueError, match="no kernel for attn_implementation='flex_attention'"):
            load(checkpoint, attention="flex_attention")(IDS, attention_mask=ONES)


def average(gathered: Result) -> Result:
    for gradient in gathered.gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gathered


def labels_only(model: Any) -> Result:
    tokens, head_index = (torch.from_numpy(array) for array in (LAYOUT.input_ids, LAYOUT.head_index))
    logits = model(tokens.unsqueeze(0), prefix_grouper=LAYOUT, logits_to_keep=head_index).logits
    every_token = logits.new_zeros(1, LAYOUT.num_tokens, logits.shape[-1]).index_copy(1, head_index, logits)
    return result(model, unpack(every_token))


def sliced_by_the_caller(model: Any) -> Result:
    """Slice inputs and gather outputs in the caller, as verl's engine does."""
    tokens, position_ids, num_padding = ulysses.ulysses_pad_and_slice_inputs(
        torch.from_numpy(LAYOUT.input_ids).unsqueeze(0),
        torch.from_numpy(LAYOUT.position_ids).unsqueeze(0),
        dist.get_world_size(),
    )
    context = PackedAttention(LAYOUT, select_kernel("sdpa", "cpu"), group=dist.group.WORLD)
    logits = model(tokens, position_ids=position_ids, prefix_grouper=context).logits
    logits = ulysses.gather_outputs_and_unpad(logits, gather_dim=1, unpad_dim=1, padding_size=num_padding)
    assert context.calls[ATTENTION] == model.config.num_hidden_layers
    return result(model, unpack(logits))


def run_rank(rank: int, exact: list[str]) -> None:
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    try:
        for path in exact:
            for run in (padded, packed, labels_only, sliced_by_the_caller):
                assert_same(average(run(load(path).train())), reference(path))
            model = load(path).train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            assert_same(average(packed(model)), reference(path))
        with pytest.raises(ValueError, match="do not support Ulysses"):
            grouped(load(exact[0]))
    finally:
        ulysses.set_ulysses_sequence_parallel_group(None)


def test_ranks_match_one_process(qwen3: str, split_llama: str, tmp_path: Path) -> None:
    assert LAYOUT.num_tokens % 2, "the last rank has padding"
    repeated = save_qwen3(tmp_path / "repeated", num_key_value_heads=1)  # one key/value head, on both ranks
    on_ranks(2, run_rank, [qwen3, split_llama, repeated])
