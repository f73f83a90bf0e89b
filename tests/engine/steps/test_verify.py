"""Verify mode lets clean runs pass and stops, or falls back, when shared prefixes give other numbers."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry

from tests.engine.broken_layouts import FAULTS, BrokenMode, wrong_kv_row
from tests.engine.ranks import on_ranks
from tests.engine.value_models import critic_batch, critic_loss, run_value_reference, save_value_model
from tests.support import (
    Result,
    actor_loss,
    assert_same,
    clone,
    group,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
)
from verl_pg_plugin.engine.batch.sequences import Sequences
from verl_pg_plugin.engine.requirements import OFF
from verl_pg_plugin.engine.steps.token_comparison import Tolerance
from verl_pg_plugin.engine.steps.verify import MismatchError
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = [*group(30, [25, 19, 31, 7], 1), *group(18, [22, 24], 2), *group(33, [14], 3)]
NUM_LOGICAL = sum(len(sample.prompt) + len(sample.response) for sample in SAMPLES)
ALWAYS = {"verify": "every_n", "verify_every": 1}
PRECISIONS = {
    name: {"mixed_precision": {"param_dtype": name, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    for name in ("fp32", "bf16", "fp16")
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"))


def break_layouts(engine: Any, fault: Any) -> Any:
    """The engine with ``fault`` in every layout that shares rows."""
    mode = engine.sharing
    engine.sharing = BrokenMode(mode.kernel, mode.row_multiple, mode.static_rows, mode.sp_group, fault)
    return engine


def infer(engine: Any, batch: TensorDict) -> dict[str, list[float]]:
    with engine.eval_mode():
        return engine.infer_batch(clone(batch))["metrics"]


def update(engine: Any, batch: TensorDict, loss: Any = None) -> dict[str, list[float]]:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        return engine.forward_backward_batch(clone(batch), loss or actor_loss())["metrics"]


def random_samples(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(1, 60)), rng.integers(1, 40, size=rng.integers(1, 6)).tolist()) for _ in range(3)]
    return [sample for i, (prompt, responses) in enumerate(sizes) for sample in group(prompt, responses, 10 * seed + i)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scale", [0.05, 0.2, 0.5])
def test_random_groups_pass_whatever_the_scale_of_the_weights(tmp_path: Path, precision: str, scale: float) -> None:
    path = save_tiny_model(tmp_path, initializer_range=scale)
    engine = make_engine(path, packed=True, engine={**ALWAYS, **PRECISIONS[precision], "verify_rows": 3})
    verified = 0
    for seed in range(12):
        batch = make_batch(random_samples(seed), calculate_sum_pi_squared=True)
        verified += infer(engine, batch)["prefix_grouper/verified_rows"][0]
    verified += update(engine, batch)["prefix_grouper/verified_rows"][0]
    assert verified >= 30


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_layout_is_caught(qwen3: str, precision: str, fault: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "first", "verify_rows": 4, **PRECISIONS[precision]})
    break_layouts(engine, FAULTS[fault])
    with pytest.raises(MismatchError, match="log_probs"):
        infer(engine, make_batch(SAMPLES, calculate_entropy=False))


@pytest.mark.parametrize("fault", ["wrong_kv_row", "position_off_by_one"])
def test_a_fault_is_caught_before_the_update_that_it_would_spoil(qwen3: str, fault: str) -> None:
    engine = break_layouts(make_engine(qwen3, packed=True, engine={"verify": "first"}), FAULTS[fault])
    with pytest.raises(MismatchError, match="update micro-batch 0"):
        update(engine, make_batch(SAMPLES))


def test_the_message_names_sample_token_and_ways_out(qwen3: str) -> None:
    engine = break_layouts(make_engine(qwen3, packed=True, engine={"verify": "first", "verify_rows": 7}), wrong_kv_row)
    batch = make_batch(SAMPLES)
    tu.assign_non_tensor_stack(batch, "uid", [f"prompt-{i // 2}" for i in range(len(SAMPLES))])
    with pytest.raises(MismatchError) as caught:
        infer(engine, batch)
    message = str(caught.value)
    for part in (
        r"rank 0: sample \d \(uid prompt-\d\) of the 7 in forward-only micro-batch 0",
        r"of response token \d+ of \d+ is -?[\d.]+, and alone -?[\d.]+ \(error [\d.]+, tolerance [\d.e-]+",
        r"2 layers, all through packed attention, torch\.float32, attention kernel sdpa",
        r"use_prefix_grouper=False.*on_mismatch=rmpad.*verify_tolerance",
    ):
        assert re.search(part, message), message


def test_first_verifies_one_micro_batch_of_each_kind(qwen3: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "first"})
    batch = make_batch(SAMPLES, max_token_len_per_gpu=120)
    verified = [step(engine, batch)["prefix_grouper/verified_rows"] for step in (infer, update, infer, update)]
    assert verified == [[2.0], [2.0], [0.0], [0.0]]


def test_first_waits_for_a_micro_batch_that_shares_something(qwen3: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "first"})
    lone = make_batch(SAMPLES[6:])
    verified = [infer(engine, batch)["prefix_grouper/verified_rows"][0] for batch in (lone, make_batch(SAMPLES), lone)]
    assert verified == [0, 2, 0]


def test_every_n_counts_micro_batches_across_mini_batches(qwen3: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "every_n", "verify_every": 3, "verify_rows": 1})
    batch = make_batch(SAMPLES, use_dynamic_bsz=False, micro_batch_size_per_gpu=4)  # two micro-batches
    assert [infer(engine, batch)["prefix_grouper/verified_rows"][0] for _ in range(6)] == [1, 1, 0, 1, 1, 0]


def test_samples_take_turns_and_the_one_that_shares_most_comes_first(
    qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(qwen3, packed=True, engine={**ALWAYS, "verify_rows": 2})
    chosen: list[list[int]] = []
    choose = engine.verifier._choose

    def record(sequences: Sequences, micro_batch: TensorDict) -> list[int]:
        rows = choose(sequences, micro_batch)
        chosen.append((sequences.prompt_lengths + np.diff(sequences.offsets))[rows].tolist())
        return rows

    monkeypatch.setattr(engine.verifier, "_choose", record)
    fillers = [Sample([2] * 127, [2], mask=[0])] * 2
    for _ in range(5):
        infer(engine, make_batch([*SAMPLES, *fillers]))
    sizes = [2 * len(s.prompt) + len(s.response) for s in [*SAMPLES, *fillers]]
    assert chosen[0][0] == sizes[2], "the longest response of the longest shared prompt"
    assert set(chosen[0]).isdisjoint(sizes[6:]), "no lone sample and no filler row"
    assert {size for rows in chosen for size in rows} == set(sizes)


def test_gradients_and_outputs_are_those_of_a_run_without(qwen3: str) -> None:
    batch = make_batch(SAMPLES, max_token_len_per_gpu=120)
    engine = make_engine(qwen3, packed=True, engine=ALWAYS)
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


def test_rmpad_on_mismatch_goes_on_with_the_right_numbers(qwen3: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "first", "on_mismatch": "rmpad", "verify_rows": 7})
    break_layouts(engine, wrong_kv_row)
    batch = make_batch(SAMPLES, max_token_len_per_gpu=120)
    with caplog.at_level(logging.WARNING):
        assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))
    assert caplog.text.count("From here on nothing is shared (prefix_grouper.on_mismatch=rmpad)") == 1
    metrics = update(engine, batch)
    assert metrics["prefix_grouper/verify_fallback"] == [1.0]
    assert metrics["prefix_grouper/rmpad_micro_batches"][0] >= 2
    assert metrics["prefix_grouper/physical_tokens"] == [NUM_LOGICAL - len(SAMPLES)]


def test_an_update_that_falls_back_midway_counts_what_it_ran(qwen3: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "first", "on_mismatch": "rmpad", "verify_rows": 7})
    break_layouts(engine, wrong_kv_row)
    metrics = update(engine, make_batch(SAMPLES, max_token_len_per_gpu=120))
    assert metrics["prefix_grouper/verify_fallback"] == [1.0]
    assert metrics["prefix_grouper/rmpad_micro_batches"] == [2.0]
    assert metrics["prefix_grouper/physical_tokens"] == [NUM_LOGICAL - len(SAMPLES)]


def test_gradients_of_an_update_that_falls_back_are_right(qwen3: str) -> None:
    batch = make_batch(SAMPLES, max_token_len_per_gpu=120)
    engine = make_engine(qwen3, packed=True, engine={"verify": "first", "on_mismatch": "rmpad", "verify_rows": 7})
    engine.verifier.verified.add("forward-only")  # the old log-probs were verified before the fault
    expected = run_reference(qwen3, batch, actor_loss())
    found = run_engine(break_layouts(engine, wrong_kv_row), batch, actor_loss())
    assert_same(Result({}, found.gradients), Result({}, expected.gradients))
    assert engine.verifier.fallen_back


def test_a_tolerance_of_the_user_replaces_the_measured_one(qwen3: str) -> None:
    broken = {"verify": "first", "verify_rows": 7}
    batch = make_batch(SAMPLES)
    loose = break_layouts(make_engine(qwen3, packed=True, engine={**broken, "verify_tolerance": 10.0}), wrong_kv_row)
    assert infer(loose, batch)["prefix_grouper/verify_max_error"][0] > 0.01
    strict = make_engine(qwen3, packed=True, engine={**broken, "verify_tolerance": 1e-9})
    with pytest.raises(MismatchError, match="tolerance 1e-09"):
        infer(strict, batch)


def test_tolerances_of_float32_stay_near_one_ten_thousandth(qwen3: str) -> None:
    noise = [torch.full((100,), 1e-7)]
    assert Tolerance.from_noise(noise, torch.float32).per_token == pytest.approx(1.2e-4, rel=0.05)


@pytest.mark.parametrize("noise", [[float("nan"), 1e-7], [float("inf")]], ids=["some", "all"])
def test_noise_without_bound_gives_no_tolerance_without_bound(noise: list[float]) -> None:
    tolerance = Tolerance.from_noise([torch.tensor(noise)], torch.float32)
    assert tolerance.per_token == pytest.approx(1.2e-4, rel=0.05)
    assert tolerance.mean < tolerance.per_token


def test_a_value_that_is_not_a_number_on_one_side_is_a_mismatch(qwen3: str) -> None:
    def nan_inside(layout: Any) -> Any:
        return replace(layout, position_ids=np.full_like(layout.position_ids, 1 << 40))

    engine = break_layouts(make_engine(qwen3, packed=True, engine={"verify": "first"}), nan_inside)
    with pytest.raises(MismatchError):
        infer(engine, make_batch(SAMPLES))


@pytest.mark.parametrize(
    "options",
    [
        {"engine": {"logits_chunk_size": 3}},
        {"engine": {"static_rows": True}},
        {"model": {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}},
        {"engine": {"min_dedup_ratio": 5.0}},
    ],
    ids=str,
)
def test_other_options_are_verified_too(qwen3: str, options: dict) -> None:
    options["engine"] = {**ALWAYS, "verify_rows": 7, **options.get("engine", {})}
    engine = make_engine(qwen3, packed=True, **options)
    batch = make_batch(SAMPLES, max_token_len_per_gpu=190)
    assert infer(engine, batch)["prefix_grouper/verified_rows"][0] >= 3
    assert update(engine, batch)["prefix_grouper/verify_max_error"][0] < 1e-4


def test_static_rows_verify_no_more_samples_than_the_budget_holds(qwen3: str) -> None:
    engine = make_engine(qwen3, packed=True, engine={**ALWAYS, "static_rows": True, "verify_rows": 7})
    metrics = infer(engine, make_batch(SAMPLES[:4], max_token_len_per_gpu=120))
    assert metrics["prefix_grouper/verified_rows"] == [1.0]


def test_a_critic_is_verified_by_its_values(tmp_path: Path) -> None:
    path = save_value_model(tmp_path)
    batch = critic_batch(SAMPLES)
    value = {
        "engine": {"verify": "first", "verify_rows": 7},
        "model": {"model_type": "value_model"},
        "engine_cls": EngineRegistry.get_engine_cls("value_model", "fsdp2"),
    }
    engine = make_engine(path, packed=True, **value)
    assert_same(run_engine(engine, batch, critic_loss()), run_value_reference(path, batch))
    broken = break_layouts(make_engine(path, packed=True, **value), wrong_kv_row)
    with pytest.raises(MismatchError, match="values of response token"):
        update(broken, batch, critic_loss())


def test_a_layer_that_skips_the_packed_attention_fails_in_the_verifying_forward(
    qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "first"})
    monkeypatch.setattr(engine, "num_attention_layers", 3)
    with pytest.raises(RuntimeError, match=f"ran in 2 of 3 layers.*{OFF}"):
        infer(engine, make_batch(SAMPLES))


def test_dropout_is_refused_whether_verified_or_not(qwen3: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    lora = {"lora_rank": 4, "lora_adapter_path": str(tmp_path)}
    for verify in ("first", "off"):
        with pytest.raises(ValueError, match=r"lora_dropout.*p=0\.1.*use_prefix_grouper=False"):
            make_engine(qwen3, packed=True, engine={"verify": verify}, model=lora)


def test_the_padded_mode_is_refused(qwen3: str) -> None:
    padded = {"engine": {"verify": "first", "use_dynamic_bsz": False}, "model": {"use_remove_padding": False}}
    with pytest.raises(ValueError, match=r"needs verify=off.*use_remove_padding=True"):
        make_engine(qwen3, packed=True, **padded)


SPLITS = [[0, 1, 4, 6], [2, 3, 5]]


def mismatch_on_rank_one(rank: int, path: str) -> tuple[str, Result, list[dict[str, list[float]]]]:
    """The error where rank 1 has a fault, then the results of falling back, and metrics of both."""
    batch = tu.index_select_tensor_dict(make_batch(SAMPLES, max_token_len_per_gpu=120), SPLITS[rank])
    message = ""
    for on_mismatch in ("raise", "rmpad"):
        engine = make_engine(
            path, packed=True, engine={"verify": "first", "on_mismatch": on_mismatch, "verify_rows": 4}
        )
        before = infer(engine, batch)
        engine.verifier.verified.clear()
        if rank == 1:
            break_layouts(engine, wrong_kv_row)
        if on_mismatch == "raise":
            with pytest.raises(MismatchError) as caught:
                update(engine, batch)
            message = str(caught.value)
        else:
            return message, run_engine(engine, batch, actor_loss()), [before, update(engine, batch)]
    raise AssertionError


def test_a_mismatch_on_one_rank_stops_both_or_takes_both_back(qwen3: str) -> None:
    ranks = on_ranks(2, mismatch_on_rank_one, qwen3)
    reference = run_reference(qwen3, make_batch(SAMPLES), actor_loss())
    for mine, (message, result, (before, after)) in zip(SPLITS, ranks, strict=True):
        assert message.startswith("rank 1: sample")
        outputs = {name: [values[row] for row in mine] for name, values in reference.outputs.items()}
        assert_same(result, Result({name: outputs[name] for name in result.outputs}, reference.gradients))
        assert before["prefix_grouper/verified_rows"] == [4.0]
        assert after["prefix_grouper/verify_fallback"] == [1.0]
    assert ranks[0][2][0]["prefix_grouper/verify_max_error"] == ranks[1][2][0]["prefix_grouper/verify_max_error"]


def verify_under_ulysses(rank: int, path: str) -> tuple[list[float], str]:
    """Largest errors of a clean run, and the error message of a fault, where two ranks share each sequence."""
    options = {**ALWAYS, "verify_rows": 4, "ulysses_sequence_parallel_size": 2}
    engine, batch = make_engine(path, packed=True, engine=options), make_batch(SAMPLES, max_token_len_per_gpu=60)
    errors = [step(engine, batch)["prefix_grouper/verify_max_error"][0] for step in (infer, update)]
    with pytest.raises(MismatchError) as caught:
        infer(break_layouts(engine, wrong_kv_row), batch)
    return errors, str(caught.value)


def test_ranks_that_share_sequences_verify_them_together(qwen3: str) -> None:
    (errors, message), second = on_ranks(2, verify_under_ulysses, qwen3)
    assert max(errors) < 1e-5
    assert "log_probs of response token" in message
    assert second == (errors, message), "or one rank stops and the other waits for it"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_bf16_on_a_gpu_passes_clean_and_fails_broken(tmp_path: Path, fault: str | None) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "head_dim": 64}
    path = save_tiny_model(tmp_path, **sizes, num_attention_heads=8, vocab_size=8000, initializer_range=0.05)
    engine = make_engine(path, packed=True, engine={**ALWAYS, **PRECISIONS["bf16"], "verify_rows": 8})
    if fault is None:
        for seed in range(20):
            infer(engine, make_batch([*group(700, [300, 40, 512, 129], seed), *random_samples(seed)]))
        return
    break_layouts(engine, FAULTS[fault])
    with pytest.raises(MismatchError):
        infer(engine, make_batch(group(60, [90, 40, 112, 64], 1)))
