"""Verify mode passes exact runs, compares the configured samples and raises on a difference."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.batches import Sample, make_batch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.architectures.tiny_configs import save_causal
from tests.engine.ranks import on_ranks
from tests.precision import PRECISIONS
from tests.support import check_exact, critic_batch, group, infer, jagged, make_engine, save_tiny_model, update
from verl_pg_plugin.config import PrefixGrouperOptions
from verl_pg_plugin.engine import verify as verify_module
from verl_pg_plugin.engine.batch import read_sequences
from verl_pg_plugin.engine.micro_batch import MiniBatch
from verl_pg_plugin.engine.verify import MismatchError, Tolerance, Verifier, compare, relative_errors
from verl_pg_plugin.layout import PackedLayout

SAMPLES = [*group(30, [25, 19, 31, 7], 1), *group(18, [22, 24], 2), *group(33, [14], 3)]
FIRST, ALWAYS = {"verify": "first"}, {"verify": "every_1"}


def random_samples(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(1, 60)), rng.integers(1, 40, size=rng.integers(1, 6)).tolist()) for _ in range(3)]
    return [sample for i, (prompt, responses) in enumerate(sizes) for sample in group(prompt, responses, 10 * seed + i)]


def wrong_key(layout: PackedLayout) -> PackedLayout:
    """Every segment reads its last ancestor's token twice in place of the first."""
    kv_index = layout.kv_index.copy()
    for segment in np.flatnonzero(layout.segment_start):
        start = layout.cu_seqlens_k[segment]
        kv_index[start] = kv_index[start + layout.segment_start[segment] - 1]
    return replace(layout, kv_index=kv_index)


def position_off_by_one(layout: PackedLayout) -> PackedLayout:
    """Segments that continue a prefix start one position late."""
    late = np.repeat(layout.segment_start > 0, np.diff(layout.cu_seqlens_q))
    return replace(layout, position_ids=layout.position_ids + late)


def wrong_head(layout: PackedLayout) -> PackedLayout:
    """Responses read the head's output of the token after theirs."""
    return replace(layout, response_head=(layout.response_head + 1) % len(layout.head_index))


FAULTS = {fault.__name__: fault for fault in (wrong_key, position_off_by_one, wrong_head)}


def break_layouts(engine: Any, fault: Callable[[PackedLayout], PackedLayout] = wrong_key) -> Any:
    """Apply ``fault`` to every layout that shares tokens; returns the engine."""
    mini_batch = engine._mini_batch

    def broken(*args: Any) -> MiniBatch:
        batch = mini_batch(*args)
        inputs = batch.inputs
        vars(batch)["inputs"] = lambda layout, *args, **context: inputs(
            fault(layout) if layout.shares_tokens else layout, *args, **context
        )
        return batch

    engine._mini_batch = broken
    return engine


def inferred(engine: Any, batch: TensorDict) -> dict[str, list[float]]:
    return infer(engine, batch)["metrics"]


def updated(engine: Any, batch: TensorDict) -> dict[str, list[float]]:
    return update(engine, batch).metrics


def verified(metrics: dict[str, list[float]]) -> float:
    (samples,) = metrics["prefix_grouper/verified_sequences"]
    return samples


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_random_groups_pass_whatever_the_scale_of_the_weights(tmp_path: Path, precision: str, scale: float) -> None:
    path = save_tiny_model(tmp_path, initializer_range=scale)
    engine = make_engine(path, engine={**ALWAYS, **PRECISIONS[precision]})
    batches = [make_batch(random_samples(seed), calculate_sum_pi_squared=True) for seed in range(3)]
    assert sum(verified(inferred(engine, batch)) for batch in batches) + verified(updated(engine, batches[-1])) >= 6


@pytest.mark.parametrize(
    ("fault", "precision"),
    [*(("wrong_key", precision) for precision in PRECISIONS), ("position_off_by_one", "bf16"), ("wrong_head", "bf16")],
)
def test_a_fault_in_the_layout_is_caught(qwen3: str, fault: str, precision: str) -> None:
    """Tolerances are widest in bf16."""
    engine = make_engine(qwen3, engine={**FIRST, **PRECISIONS[precision]})
    with pytest.raises(MismatchError, match="log_probs"):
        infer(break_layouts(engine, FAULTS[fault]), make_batch(SAMPLES, calculate_entropy=False))


def verify_under_ulysses(rank: int, path: str) -> tuple[list[float], str]:
    """Return the largest errors of an exact run and the message of a faulty one under Ulysses."""
    options = {**ALWAYS, "ulysses_sequence_parallel_size": 2}
    engine, batch = make_engine(path, engine=options), make_batch(SAMPLES, max_token_len_per_gpu=60)
    metrics = [step(engine, batch) for step in (inferred, updated)]
    assert list(map(verified, metrics)) == [4.0] * 2, "two of each of two micro-batches, counted once for two ranks"
    with pytest.raises(MismatchError, match="log_probs of response token") as caught:
        infer(break_layouts(engine), batch)
    return [of_step["prefix_grouper/verify_max_error"][0] for of_step in metrics], str(caught.value)


def test_ulysses_ranks_verify_their_sequences_together(qwen3: str) -> None:
    (errors, message), second = on_ranks(2, verify_under_ulysses, qwen3)
    assert max(errors) < 1e-5
    assert "rank 1:" not in message
    assert (errors, message) == second, "or one rank stops and the other blocks"


@pytest.mark.gpu
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_bf16_on_a_gpu_passes_clean_and_fails_broken(tmp_path: Path, fault: str | None) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "head_dim": 64}
    path = save_tiny_model(tmp_path, **sizes, num_attention_heads=8, vocab_size=8000, initializer_range=0.05)
    engine = make_engine(path, engine={**ALWAYS, **PRECISIONS["bf16"]})
    if fault is None:
        for seed in range(20):
            infer(engine, make_batch([*group(700, [300, 40, 512, 129], seed), *random_samples(seed)]))
        return
    with pytest.raises(MismatchError):
        infer(break_layouts(engine, FAULTS[fault]), make_batch(group(60, [90, 40, 112, 64], 1)))


def test_the_message_names_sample_token_and_fixes(qwen3: str) -> None:
    batch = make_batch(SAMPLES)
    tu.assign_non_tensor_stack(batch, "uid", [f"prompt-{i // 2}" for i in range(len(SAMPLES))])
    with pytest.raises(MismatchError) as caught:
        infer(break_layouts(make_engine(qwen3, engine=FIRST)), batch)
    for part in (
        r"^\+\+prefix_grouper.verify=first: sample \d \(uid prompt-\d\) of the 7 in forward-only micro-batch 0 ",
        r"of response token \d+ of \d+ is -?[\d.]+, and alone -?[\d.]+ \(error [\d.]+, tolerance [\d.e-]+",
        r"2 layers, all through packed attention, attention kernel sdpa, torch\.float32",
        r"use_prefix_grouper=False.*verify_tolerance",
    ):
        assert caught.match(part)


WHOLE, LONE, CUT = make_batch(SAMPLES), make_batch(SAMPLES[6:]), make_batch(SAMPLES, max_token_len_per_gpu=120)
BY_FOUR = make_batch(SAMPLES, use_dynamic_bsz=False, micro_batch_size_per_gpu=4)  # two micro-batches
BY_ONE = make_batch(group(60, [3, 3, 3], 1), use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
WHEN: dict[str, tuple[str, list, list[int]]] = {
    "first of each kind": ("first", [(inferred, CUT), (updated, CUT)] * 2, [2, 2, 0, 0]),
    "first that shares something": ("first", [(inferred, LONE), (inferred, WHOLE), (inferred, LONE)], [0, 2, 0]),
    # A prompt that fills a micro-batch reads no token of another chunk.
    "first that reads what a chunk left, and the chunk": ("first", [(inferred, BY_ONE)] * 2, [2, 0]),
    "every third across mini-batches": ("every_3", [(inferred, BY_FOUR)] * 6, [2, 2, 0, 2, 2, 0]),
}


@pytest.mark.parametrize("when", WHEN)
def test_number_of_verified_sequences_in_each_step(qwen3: str, when: str) -> None:
    verify, steps, expected = WHEN[when]
    engine = make_engine(qwen3, splits="chunk" in when, engine={"verify": verify})
    assert [verified(step(engine, batch)) for step, batch in steps] == expected


def test_first_also_verifies_a_later_batch_after_turns_that_continue_each_other(qwen3: str) -> None:
    """Such turns attend to no token of another sequence, so they hide a wrong key."""
    engine = break_layouts(make_engine(qwen3, engine=FIRST))
    turns = make_batch([Sample(range(4 * k + 3), range(4 * k + 3, 4 * k + 5)) for k in range(4)])
    assert [verified(inferred(engine, turns)) for _ in range(2)] == [2, 0]
    with pytest.raises(MismatchError, match="update micro-batch 0"):
        update(engine, WHOLE)


def test_a_tolerance_of_the_user_replaces_the_measured_one(qwen3: str) -> None:
    loose, strict = (make_engine(qwen3, engine={**ALWAYS, "verify_tolerance": t}) for t in (10.0, 1e-9))
    two = make_batch(SAMPLES[4:], use_dynamic_bsz=False, micro_batch_size_per_gpu=2)  # the last one shares no token
    assert inferred(break_layouts(loose), two)["prefix_grouper/verify_max_error"][0] > 0.01
    with pytest.raises(MismatchError, match="tolerance 1e-09"):
        infer(strict, WHOLE)


def test_a_critic_is_verified_by_its_values(value_model: str) -> None:
    engine, batch = make_engine(value_model, engine=ALWAYS, critic=True), critic_batch(SAMPLES)
    check_exact(engine, value_model, batch)
    with pytest.raises(MismatchError, match="values of response token"):
        update(break_layouts(engine), batch)


def test_only_a_token_that_noise_flips_may_differ_by_as_much() -> None:
    expected, errors = {"x": [torch.zeros(100)]}, torch.zeros(100)
    flip, tolerances = torch.zeros(100), {"x": Tolerance(per_token=0.1, mean=0.01)}
    flip[7], errors[7] = 0.5, 0.55
    moved = [{"x": [torch.zeros(100)]}, {"x": [flip]}, {"x": [torch.full((100,), float("inf"))]}]
    assert compare({"x": [errors]}, expected, tolerances)[1] is not None
    assert compare({"x": [errors]}, expected, tolerances, moved) == (pytest.approx(0.55), None)
    for above in (0.11, float("nan")):
        errors[42] = above
        _, worst = compare({"x": [errors]}, expected, tolerances, moved)
        assert worst
        assert worst[1].startswith("x of response token 42 of 100")


@pytest.mark.usefixtures("process_group")
def test_a_tie_that_the_first_noise_misses_is_detected_by_later_noise() -> None:
    """The token's expert depends on the sign of its noise, as at a tie of two experts."""
    verifier, ones = Verifier(PrefixGrouperOptions(verify="every_1"), "", torch.bfloat16), torch.ones(50).bfloat16()
    tie = int((verify_module.rounding_noise()(ones) > 1).nonzero()[0])

    def compute_alone(make_noise: Any, flipped: bool = False, wrong: int | None = None) -> dict[str, Any]:
        moved = make_noise()(ones) if make_noise else ones
        log_probs = -moved.double()
        log_probs[tie] -= 0.5 * (flipped or bool(moved[tie] < 1))
        if wrong is not None:
            log_probs[wrong] -= 0.5
        return {"log_probs": [log_probs] * 2}

    def check(got: dict[str, Any]) -> float:
        planned = SimpleNamespace(reads_ancestors=True)
        return verifier.check(got, compute_alone, planned, [0, 1], WHOLE, "update")

    assert check(compute_alone(None, flipped=True)) == pytest.approx(0.5)
    with pytest.raises(MismatchError, match=f"response token {tie + 1} of 50"):
        check(compute_alone(None, flipped=True, wrong=tie + 1))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_one_wrong_token_of_a_moe_model_is_detected_in_bf16(model_type: str, tmp_path: Path, monkeypatch) -> None:
    engine = make_engine(save_causal(tmp_path, model_type), engine={**ALWAYS, **PRECISIONS["bf16"]})
    infer(engine, make_batch(random_samples(0)))
    compute = MiniBatch.compute

    def one_wrong_token(batch: MiniBatch, inputs: Any, fields: TensorDict) -> dict[str, torch.Tensor]:
        outputs = compute(batch, inputs, fields)
        if inputs.layout.shares_tokens:
            log_probs = outputs["log_probs"]
            log_probs.values()[log_probs.offsets()[1:] - 2] -= 5.0
        return outputs

    monkeypatch.setattr(MiniBatch, "compute", one_wrong_token)
    with pytest.raises(MismatchError, match="log_probs of response token"):
        infer(engine, WHOLE)


def test_samples_rotate_noise_differs_between_layers_and_counts_are_not_compared() -> None:
    verifier = Verifier(PrefixGrouperOptions(verify="every_1"), "", torch.float32)
    sequences = read_sequences(WHOLE)
    assert {sample for _ in range(4) for sample in verifier.choose(None, sequences, "update")} == set(range(7))
    move, ones = verify_module.rounding_noise(), torch.ones(64)
    assert not torch.equal(move(ones), move(ones))
    outputs = {name: jagged([torch.zeros(4)]) for name in ("values", "overlap_count")}
    assert verify_module.read_responses(outputs, [0], np.array([2])).keys() == {"values"}


@pytest.mark.parametrize("noise", [[1e-7] * 100, [float("nan"), 1e-7], [float("inf")]], ids=["little", "nan", "inf"])
def test_float32_tolerance_stays_near_1e_4_for_any_noise(noise: list[float]) -> None:
    tolerance = Tolerance.from_noise([torch.tensor(noise)], torch.float32)
    assert tolerance.per_token == pytest.approx(1.2e-4, rel=0.05)
    assert tolerance.mean < tolerance.per_token


def test_a_nan_on_one_side_is_an_infinite_error_and_on_both_sides_none() -> None:
    nan, inf = float("nan"), float("inf")
    got, expected = torch.tensor([nan, 1.0, nan, inf, -inf, inf]), torch.tensor([0.0, nan, nan, inf, -inf, 1.0])
    assert relative_errors({"x": [got]}, {"x": [expected]})["x"][0].tolist() == [inf, inf, 0.0, 0.0, 0.0, inf]


def test_a_small_error_in_every_token_is_a_mismatch() -> None:
    expected, got = [torch.zeros(3), torch.zeros(100)], [torch.zeros(3), torch.full((100,), 0.05)]
    for mean, sample in ((0.1, None), (0.01, 1)):
        max_error, worst = compare({"x": got}, {"x": expected}, {"x": Tolerance(per_token=0.1, mean=mean)})
        assert (max_error, worst and worst[0]) == (pytest.approx(0.05), sample)
