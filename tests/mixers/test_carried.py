"""Groups split over micro-batches: Gated DeltaNet layers go on from the states that earlier chunks publish."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.engine.carried_cases import CASES, ONE_GROUP, carry_always, carrying, carrying_engine
from tests.engine.ranks import on_ranks
from tests.mixers.hybrids import build_hybrid, save_hybrid
from tests.mixers.test_engine import relative_error, rows_alone
from tests.mixers.test_gated_delta import Found, log_probs
from tests.support import Result, actor_loss, clone, make_engine, run_engine
from verl_pg_plugin.attention.cache import CacheAccess, PrefixCache
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.interface import ATTENTION_NAME, register_attention
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.engine.batch import read_sequences
from verl_pg_plugin.engine.inputs import cache_access, consume, keep_published
from verl_pg_plugin.engine.plan import _laid_out
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.mixers.delta_layer import install
from verl_pg_plugin.planning.memory import TokenBytes
from verl_pg_plugin.planning.micro_batches import CacheWeights, MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

TWO_KINDS = pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])


def weights_of(samples: list[Sample]) -> list[torch.Tensor]:
    """Of the log-probs of each sample's response tokens."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(len(s.response), generator=generator, dtype=torch.float64) for s in samples]


def found_in(model: torch.nn.Module, rows: list[torch.Tensor]) -> Found:
    gradients = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    return {**gradients, "log_probs": torch.cat(rows)}


def alone(kind: str, samples: list[Sample]) -> Found:
    model, rows = build_hybrid(kind), []
    for sample, weight in zip(samples, weights_of(samples), strict=True):
        ids = torch.tensor([*sample.prompt, *sample.response])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(sample.prompt) - 1 : -1]
        rows.append(log_probs(logits, ids[len(sample.prompt) :]))
        (rows[-1] * weight).sum().backward()
    return found_in(model, [row.detach() for row in rows])


def in_chunks(kind: str, samples: list[Sample], budget: int, forward_only: bool, checkpointing: bool = False) -> Found:
    """Micro-batch by micro-batch, as the engine runs them."""
    register_attention()
    model, kernel, cache = build_hybrid(kind, attention=ATTENTION_NAME), select_kernel("sdpa", "cpu"), PrefixCache()
    install(model)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def compute(layout: PackedLayout, access: CacheAccess | None) -> torch.Tensor:
        """(C + N,) log-probs, as ``response_head`` indexes them."""
        logits = model(
            input_ids=torch.from_numpy(layout.input_ids)[None],
            position_ids=torch.from_numpy(layout.position_ids)[None],
            prefix_grouper=PackedAttention(layout, kernel, access),
            logits_to_keep=torch.from_numpy(layout.head_index),
            use_cache=False,
        ).logits.squeeze(0)
        outputs = log_probs(logits, torch.from_numpy(layout.labels[layout.head_index]))[:, None]
        return (outputs if access is None else access.join_outputs(outputs)).squeeze(1)

    sequences = read_sequences(make_batch(samples))
    groups = cut_micro_batches(
        sequences.order(), MicroBatchLimits(budget), CacheWeights(), forward_only=forward_only, micro_batch_cost=4.0
    )
    assert max(map(len, groups)) > 1
    rows, weights = [torch.empty(0)] * len(samples), weights_of(samples)
    for group in groups:
        for micro_batch, layout in _laid_out(group, sequences, True, forward_only):
            consumed = [] if forward_only else consume(cache, layout)
            if layout.prefill is not None:
                access = cache_access(cache, layout.prefill, publishes=True, prefill=True)
                with torch.no_grad():
                    compute(layout.prefill, access)
                keep_published(cache, access)
            access = cache_access(cache, layout, publishes=forward_only, consumed=consumed)
            with torch.no_grad() if forward_only else nullcontext():
                outputs = compute(layout, access)[torch.from_numpy(layout.response_head)]
            keep_published(cache, access)
            mine = [samples[i] for i in micro_batch.sequences]
            lengths = [len(s.prompt) + len(s.response) for s in mine]
            flat = outputs.new_zeros(sum(lengths)).index_copy(0, torch.from_numpy(layout.response_index), outputs)
            found = [row[len(s.prompt) - 1 : -1] for row, s in zip(flat.split(lengths), mine, strict=True)]
            if not forward_only:
                sum((row * weights[i]).sum() for i, row in zip(micro_batch.sequences, found, strict=True)).backward()
            for i, row in zip(micro_batch.sequences, found, strict=True):
                rows[i] = row.detach()
    assert forward_only or not cache.blocks, "all gradients are consumed"
    return found_in(model, rows)


def worst(got: Found, want: Found) -> float:
    return max(((got[n] - want[n]).abs().max() / want[n].abs().max().clamp(min=1e-3)).item() for n in got)


@TWO_KINDS
@pytest.mark.parametrize("case", CASES)
def test_chunks_are_every_sequence_alone(kind: str, case: str) -> None:
    samples, budget = CASES[case]
    want = alone(kind, samples)
    update = in_chunks(kind, samples, budget, forward_only=False)
    assert update.keys() == want.keys()
    assert worst(update, want) <= 1e-10
    assert worst(in_chunks(kind, samples, budget, forward_only=True), want) <= 1e-10


def test_recomputed_layers_read_and_settle_once() -> None:
    samples, budget = CASES["a_trie_of_three_levels"]
    kept, again = (
        in_chunks("qwen3_next", samples, budget, forward_only=False, checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("forgotten", ["state", "inputs"])
def test_gradients_that_other_chunks_leave_are_needed(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take = CacheAccess.take_state_gradient

    def forget(self: CacheAccess, place: tuple[int, str, int]) -> torch.Tensor | None:
        return None if place[1] == forgotten else take(self, place)

    monkeypatch.setattr(CacheAccess, "take_state_gradient", forget)
    assert worst(in_chunks("qwen3_5_text", ONE_GROUP, 36, forward_only=False), alone("qwen3_5_text", ONE_GROUP)) > 1e-3


@TWO_KINDS
@pytest.mark.parametrize("case", ["one_group_of_8", "a_trie_of_three_levels", "small_groups_beside_large_ones"])
def test_split_groups_are_as_exact_as_whole_ones_through_the_engine(kind: str, case: str, tmp_path: Path) -> None:
    samples, budget = CASES[case]
    path = save_hybrid(tmp_path, kind)
    engine, batch = carrying_engine(path), make_batch(samples, max_token_len_per_gpu=budget)
    with carrying(engine):
        got = run_engine(engine, clone(batch), actor_loss())
    assert_as_exact(got, run_engine(engine, make_batch(samples), actor_loss()), rows_alone(path, kind, samples))
    with engine.eval_mode(), carrying(engine):
        log_probs = engine.infer_batch(batch)["model_output"]["log_probs"]
    for row, want, sample in zip(log_probs.unbind(), got.outputs["log_probs"], samples, strict=True):
        assert (row[len(sample.prompt) - 1 : -1] - want).abs().max() <= 2e-5


def assert_as_exact(got: Result, whole: Result, references: tuple[Result, Result]) -> None:
    """Float32 itself is off: twice as far from float64 as stock, or the same groups in one micro-batch, at most."""
    stock, exact = references

    def errors(one: Result) -> list[float]:
        outputs = [
            max(
                float((a.double() - b).abs().max()) for a, b in zip(one.outputs[name], exact.outputs[name], strict=True)
            )
            for name in got.outputs
        ]
        return [*outputs, max(relative_error(one, exact, name) for name in exact.gradients)]

    for mine, *theirs in zip(*map(errors, (got, whole, stock)), strict=True):
        assert mine <= max(1e-5, 2 * max(theirs))


def run_under_ulysses(rank: int, path: str) -> list[Result]:
    engine = make_engine(path, packed=True, engine={"ulysses_sequence_parallel_size": 2})
    carry_always(engine)
    with carrying(engine):
        split = run_engine(engine, make_batch(ONE_GROUP, max_token_len_per_gpu=18, sp_size=2), actor_loss())
    return [split, run_engine(engine, make_batch(ONE_GROUP, sp_size=2), actor_loss())]


@TWO_KINDS
def test_split_groups_of_tokens_spread_over_two_ranks_are_as_exact(kind: str, tmp_path: Path) -> None:
    path = save_hybrid(tmp_path, kind)
    references = rows_alone(path, kind, ONE_GROUP)
    for split, whole in on_ranks(2, run_under_ulysses, path):
        assert_as_exact(split, whole, references)


def test_memory_of_the_cache_is_what_the_config_says(tmp_path: Path) -> None:
    engine = carrying_engine(save_hybrid(tmp_path))
    batch, sizes = make_batch(ONE_GROUP, max_token_len_per_gpu=36), TokenBytes.of(engine.module.config, itemsize=4)
    assert (sizes.caching_layers, sizes.state) == (1, 3 * 4 * (4 * 8 * 8 + 3 * 64))
    cached = len(ONE_GROUP[0].prompt) - 1  # sequences fork one token before they part
    with engine.eval_mode(), carrying(engine):
        log_prob = engine.infer_batch(clone(batch))["metrics"]["prefix_grouper/peak_carried_gib"]
    with engine.train_mode():
        update = engine.forward_backward_batch(batch, actor_loss())["metrics"]["prefix_grouper/peak_carried_gib"]
    expected = cached * sizes.key_value + sizes.state, sizes.beside(cached, 0, states=1)
    for (gib,), layers in zip((log_prob, update), expected, strict=True):
        assert 0 <= gib * 2**30 - layers <= 32 * cached, "and a few outputs of the head"
