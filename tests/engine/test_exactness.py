"""Log-probs, entropies, values and gradients of both modes match those of single sequences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.batches import Sample, make_batch

from tests.architectures.tiny_configs import save_causal
from tests.support import (
    FUSED_HEAD,
    check_exact,
    critic_batch,
    group,
    infer,
    make_engine,
    run_reference,
    save_tiny_model,
    update,
)
from verl_pg_plugin.issue import BatchError

PAD = 0
MIXED = [*group(20, [5, 9, 1, 7], 1), *group(3, [5, 3], 2), *group(33, [4], 3)]
TURN = [*range(40, 52)]
WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
ONE_HEAD = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}

CASES: dict[str, list[Sample]] = {
    "uneven_groups_and_prompts_of_different_length": MIXED,
    "tool_tokens_are_attended_though_loss_masked": [
        Sample(range(9), range(30, 42), mask=[1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1]),
        Sample(range(9), [30, 31, 7, 7], mask=[1, 1, 0, 1]),
    ],
    "pad_and_eos_and_token_zero_inside_prompt_and_response": [
        Sample([PAD, PAD, 5, PAD, 6, PAD], [PAD, 3, PAD]),
        Sample([PAD, PAD, 5, PAD, 6, PAD], [PAD, PAD]),
    ],
    "same_prompt_in_samples_that_are_not_neighbours": [
        MIXED[0],
        *group(8, [3], 5),
        MIXED[1],
        *group(9, [2], 6),
        MIXED[2],
    ],
    "responses_without_a_token": [*MIXED, Sample(MIXED[0].prompt, []), Sample([7, 8], []), *[Sample([7], [])] * 2],
    "filler_samples_with_empty_loss_mask": [*MIXED[:3], *[Sample([2] * 127, [2], mask=[0])] * 3],
    "responses_of_one_token": [Sample(range(6), [t]) for t in (1, 2, 3)],
    "identical_responses": [Sample(range(6), range(10, 15))] * 4,
    "one_response_is_the_beginning_of_another": [Sample(range(6), range(10, stop)) for stop in (15, 18, 12)],
    "everything_unique": [sample for seed in range(10, 15) for sample in group(6, [4], seed)],
    "single_token_prompts": [Sample([4], range(20, 26)), Sample([4], range(20, 23)), Sample([5], [6])],
    "a_prompt_that_reaches_into_a_sibling_response": [
        Sample(range(6), range(10, 16)),
        Sample([*range(6), 10, 11, 12], [13, 14, 50]),
    ],
    "turns_that_only_continue_one_another": [Sample(range(4 * k + 3), range(4 * k + 3, 4 * k + 5)) for k in range(9)],
    "multi_turn_branches_three_deep": [
        *(Sample(range(8), [*TURN, *tail]) for tail in ([60, 61], [60, 62, 63], [70])),
        Sample(range(8), [41, 42]),
        Sample([*range(5), 77], [1, 2]),
    ],
}


PADDED = {"use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 64}
MODES: dict[str, dict[str, Any]] = {"packed": {}, "padded groups": PADDED}  # fields of a batch


@pytest.fixture(scope="module")
def engines(qwen3: str, packed: Any) -> dict[str, Any]:
    return {"packed": packed, "padded groups": make_engine(qwen3, padded=True)}


@pytest.mark.parametrize("case", CASES)
def test_every_token_and_gradient_equals_the_sequence_alone(engines: dict, qwen3: str, case: str) -> None:
    expected = None
    for mode, fields in MODES.items():
        batch = make_batch(CASES[case], calculate_sum_pi_squared=True, **fields)
        expected = expected or run_reference(qwen3, batch)
        check_exact(engines[mode], qwen3, batch, expected=expected)


def test_every_value_and_gradient_of_a_critic_equals_the_sequence_alone(value_model: str) -> None:
    """Prompts of one token without a response are among the cases."""
    samples, expected = [sample for case in CASES.values() for sample in case], None
    for mode, fields in MODES.items():
        batch = critic_batch(samples, **fields)
        expected = expected or run_reference(value_model, batch)
        engine = make_engine(value_model, critic=True, padded=mode == "padded groups")
        check_exact(engine, value_model, batch, expected=expected)


ORIGINAL = "original_max_position_embeddings"  # which transformers reads of longrope alone
LONGEST = max(len(sample.prompt) + len(sample.response) for sample in MIXED)
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "head_dim": 64, "v_head_dim": 8, "first_k_dense_replace": 2}
ROPE = {"rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
MODELS: dict[str, tuple[str, dict, list[Sample]]] = {
    "dynamic": ("qwen2", {"rope_parameters": {**ROPE, "rope_type": "dynamic", ORIGINAL: 999}}, MIXED),
    "longrope": ("qwen2", {"rope_parameters": {**ROPE, "rope_type": "longrope"}}, MIXED),
    **{f"windows of {name} shorter than the prompt": (name, WINDOW, MIXED) for name in ("mistral", "qwen2", "qwen3")},
    "values narrower than keys": ("deepseek_v3", LATENT | {"num_key_value_heads": 4}, CASES["single_token_prompts"]),
    "more than 4096 tokens": ("qwen3", ONE_HEAD, group(4200, [6, 9], 4)),
}


@pytest.mark.parametrize("model", MODELS)
def test_windows_and_long_sequences_are_exact_or_refused(model: str, tmp_path: Path) -> None:
    model_type, sizes, samples = MODELS[model]
    path, expected = save_tiny_model(tmp_path, model_type, **({"max_position_embeddings": LONGEST} | sizes)), None
    for mode, fields in MODES.items():
        engine, batch = make_engine(path, padded=mode == "padded groups"), make_batch(samples, **fields)
        expected = expected or run_reference(path, batch)
        check_exact(engine, path, batch, expected=expected)
        if "rope_parameters" in sizes:  # one more token: stock verl changes the frequencies of the whole micro-batch
            with pytest.raises(BatchError, match=rf"{LONGEST + 1} tokens; above {LONGEST} a "):
                infer(engine, make_batch([*samples, *group(LONGEST, [1], 4)], **fields))


IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
WAYS: dict[str, dict] = {
    **{name: {"override_config": {"_experts_implementation": name}} for name in IMPLEMENTATIONS},
    "router logits": {"override_config": {"output_router_logits": True}},
    "fused kernels": FUSED_HEAD,
}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_every_way_to_run_experts_is_exact(tmp_path: Path, model_type: str) -> None:
    """verl's FSDP engine ignores the load-balancing loss of the model's output; tests/architectures has every type."""
    path, batch = save_causal(tmp_path, model_type), make_batch(MIXED, max_token_len_per_gpu=45)
    expected = run_reference(path, batch)
    for way, model in WAYS.items():
        engine = make_engine(path, model=model)
        if way in IMPLEMENTATIONS:
            assert engine.module.config._experts_implementation == way
        assert bool(engine.log_prob_head and engine.log_prob_head.fused) == (way == "fused kernels")
        check_exact(engine, path, batch, expected=expected)


def test_fixed_micro_batch_sizes_keep_order_and_gradient_scale(engines: dict, qwen3: str) -> None:
    """With a temperature for each sample, and samples without a response token."""
    expected = None
    for size in (1, 5):
        batch = make_batch(CASES["responses_without_a_token"], **PADDED | {"micro_batch_size_per_gpu": size})
        batch["temperature"] = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.9, 0.9, 1.3, 0.5, 0.7, 0.7, 1.0])
        expected = expected or run_reference(qwen3, batch)
        for engine in engines.values():
            check_exact(engine, qwen3, batch, expected=expected)


def test_padded_groups_are_exact_with_options(qwen3: str) -> None:
    options = {"entropy_checkpointing": True, "reshard_after_forward": False}
    engine = make_engine(qwen3, padded=True, engine=options, model={"enable_gradient_checkpointing": False})
    assert engine.log_prob_head is None
    check_exact(engine, qwen3, make_batch(MIXED, **PADDED))


@pytest.mark.parametrize("mode", MODES)
def test_log_probs_do_not_depend_on_sibling_responses(engines: dict[str, Any], mode: str) -> None:
    samples = group(12, [6, 6, 6], 8)
    changed = [samples[0], Sample(samples[1].prompt, [t ^ 1 for t in samples[1].response]), samples[2]]
    before, after = (
        infer(engines[mode], make_batch(some, **MODES[mode]))["model_output"]["log_probs"].unbind()
        for some in (samples, changed)
    )
    assert [torch.equal(*rows) for rows in zip(before, after, strict=True)] == [True, False, True]


def test_unread_positions_are_zero(packed: Any) -> None:
    """The last token predicts nothing."""
    log_probs = infer(packed, make_batch(MIXED))["model_output"]["log_probs"]
    for row, sample in zip(log_probs.unbind(), MIXED, strict=True):
        assert row.shape == (len(sample.prompt) + len(sample.response),)
        assert not row[: len(sample.prompt) - 1].any()
        assert row[-1] == 0


COMPUTED = (19 + 5 + 9 + 1 + 7, 2 + 5 + 3, 33 + 4 - 1)
"""Tokens of the groups of ``MIXED``."""
COUNTED: dict[str, dict[str, float]] = {
    # The group of one shares nothing.
    "packed": {"computed_tokens": sum(COMPUTED), "attention_backend/sdpa": 1, "unshared_micro_batches": 1},
    "padding": {"computed_tokens": 3 * 60, "padding_tokens": 3 * 60 - sum(COMPUTED)},
    "padded groups": {"computed_tokens": 3 * max(COMPUTED), "groups_per_micro_batch": 3},
}


@pytest.mark.parametrize("mode", COUNTED)
def test_metrics_count_computed_tokens(engines: dict[str, Any], qwen3: str, mode: str) -> None:
    padding = {"pad_to_length": True, "pad_to_length_bucket": 60}
    engine = make_engine(qwen3, engine=padding) if mode == "padding" else engines[mode]
    cut = PADDED if mode == "padded groups" else {"max_token_len_per_gpu": 45}
    metrics, expected = update(engine, make_batch(MIXED, **cut)).metrics, COUNTED[mode]
    assert {name: metrics[f"prefix_grouper/{name}"] for name in expected} == {n: [x] for n, x in expected.items()}


def test_dynamic_micro_batches_of_padded_groups_are_refused(engines: dict[str, Any]) -> None:
    batch = make_batch(MIXED, use_remove_padding=False, max_token_len_per_gpu=100)
    with pytest.raises(BatchError, match=r"use_remove_padding=True.*use_dynamic_bsz=False"):
        infer(engines["padded groups"], batch)
