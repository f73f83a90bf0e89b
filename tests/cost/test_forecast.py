"""What ``estimate`` predicts follows from the rows that the engine would compute."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from verl_pg_plugin.batching.session_order import BatchRows
from verl_pg_plugin.cost.flops import ModelFlops
from verl_pg_plugin.cost.forecast import Batch, Forecast, Settings, forecast
from verl_pg_plugin.cost.kept_layers import KeptBudget, LayerActivations
from verl_pg_plugin.layout import build_prefix_order
from verl_pg_plugin.planning.memory import TokenMemory

CONFIG = Qwen3Config(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
)
FLOPS = ModelFlops.of_config(CONFIG)
MEMORY = TokenMemory.of(CONFIG, torch.bfloat16.itemsize, checkpointing=True, keeps_attention=True)
P, R, N, G = 2048, 256, 8, 4
GROUPS = Batch.of_lengths([P] * G, [[R] * N] * G)
ROWS = G * (P - 1 + N * R)
WHOLE = Settings(budget=G * N * (P + R), compile_layers=False)


def predict(batch: Batch = GROUPS, settings: Settings = WHOLE) -> Forecast:
    return forecast(batch, FLOPS, MEMORY, settings)


def test_rows_are_those_of_groups_that_share_their_prompt() -> None:
    found = predict()
    assert (found.logical_tokens, found.physical_tokens) == (G * N * (P + R), G * (P - 1 + N * R))
    assert found.micro_batches == 1
    assert found.old_log_prob == pytest.approx(found.flop_bound, rel=0.02), "nothing is cut, so only the parts differ"
    assert found.update > found.old_log_prob, "attention's outputs are kept for the backward"


def test_nothing_shared_saves_the_head_of_prompts_alone() -> None:
    alone = predict(Batch.of_lengths([P] * 4, [[R]] * 4))
    assert alone.dedup_ratio == pytest.approx(1, abs=1e-3)
    assert 1 < alone.old_log_prob < 1.3


def test_prompts_that_begin_alike_share_more_than_their_groups() -> None:
    system = np.arange(1000)
    prompts = [np.concatenate([system, np.full(P - 1000, 5000 + g)]) for g in range(G)]
    shared = predict(Batch.of_prompts(prompts, [[R] * N] * G))
    assert shared.physical_tokens == predict().physical_tokens - (G - 1) * 999
    assert shared.update > predict().update


def test_a_budget_that_cuts_groups_costs_and_carrying_costs_less_than_computing_again() -> None:
    tight = replace(WHOLE, budget=P + 2 * R)
    carried, again = predict(settings=tight), predict(settings=replace(tight, carry=False))
    assert carried.physical_tokens == predict().physical_tokens
    assert again.physical_tokens > carried.physical_tokens
    assert again.update < carried.update < predict().update
    assert carried.activation_gib < predict().activation_gib


@pytest.mark.parametrize("faster", [{"compile_layers": True}, {"kernel": "flash_attn_4"}])
def test_faster_layers_and_kernels_are_faster(faster: dict[str, object]) -> None:
    assert predict(settings=replace(WHOLE, **faster)).update > predict().update
    assert predict(settings=replace(WHOLE, **faster)).alone == predict().alone


def test_recomputed_attention_and_missing_checkpoints_change_the_update_alone() -> None:
    recomputing = predict(settings=replace(WHOLE, recompute_attention=True))
    assert recomputing.update < predict().update
    assert recomputing.old_log_prob == predict().old_log_prob
    assert predict(settings=replace(WHOLE, checkpointing=False)).alone[1] < predict().alone[1]


def test_kept_layers_take_memory_and_save_the_update_a_forward() -> None:
    layer = LayerActivations.of(CONFIG, torch.bfloat16)
    kept = {
        share: predict(settings=replace(WHOLE, kept=KeptBudget(layer, 4, share * layer.bytes * ROWS / 2**30)))
        for share in (0.9, 2.0, math.inf)
    }
    assert kept[0.9] == predict(), "half a layer is none"
    assert predict().update < kept[2.0].update < kept[math.inf].update
    assert kept[math.inf].old_log_prob == predict().old_log_prob
    gib = layer.bytes * ROWS / 2**30
    assert kept[2.0].activation_gib == pytest.approx(predict().activation_gib + 2 * gib)
    assert kept[math.inf].activation_gib == pytest.approx(predict().activation_gib + 4 * gib)
    price = {share: found.alone[1] / found.update for share, found in {**kept, None: predict()}.items()}
    assert price[None] - price[math.inf] == pytest.approx(FLOPS.per_row * ROWS), "one pass over every layer"
    assert price[None] - price[2.0] == pytest.approx(FLOPS.per_row * ROWS / 2)


def rows_of(*rows: tuple[str, int, int, int, int], common: int = 0) -> BatchRows:
    uids, *columns = zip(*rows, strict=True)
    return BatchRows(uids, *map(np.array, columns), common_tokens=common)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "computed"),
    [
        (rows_of(*(("a", session, 0, 9, 4) for session in range(3))), 8 + 3 * 4),
        (rows_of(("a", 0, 0, 9, 4), ("b", 0, 0, 9, 4), common=5), 2 * 12 - 4),
        (rows_of(("a", 0, 0, 9, 4), ("a", 0, 1, 20, 3), ("a", 1, 0, 9, 2)), 22 + 2),
        # The second session goes on from the prompt, whatever shorter context the first one ended with.
        (rows_of(("a", 0, 0, 9, 4), ("a", 0, 1, 5, 1), ("a", 1, 0, 9, 2)), 12 + 1 + 2),
        # A prompt that was not among those compared is shorter than what these have in common.
        (rows_of(("a", 0, 0, 4, 1), ("b", 0, 0, 9, 4), common=7), 4 + 12 - 4),
    ],
    ids=["responses", "system prompt", "turns", "edited context", "prompt shorter than what is common"],
)
def test_sequences_known_by_their_lengths_share_what_a_balance_expects(rows: BatchRows, computed: int) -> None:
    order = rows.order()
    batch = Batch.of_order(order, rows.prompt_lengths)
    assert batch.lengths.tolist() == rows.lengths[order.sequences].tolist()
    assert batch.prompt_lengths.tolist() == rows.prompt_lengths[order.sequences].tolist()
    assert build_prefix_order(batch.tokens, batch.offsets).num_new.sum() == computed
    assert predict(batch).physical_tokens == computed


@pytest.mark.parametrize(("prompts", "responses"), [([], []), ([4], [[]]), ([4], [[0]]), ([0], [[4]])])
def test_a_batch_without_a_sequence_or_a_response_is_refused(prompts: list[int], responses: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="token"):
        Batch.of_lengths(prompts, responses)
