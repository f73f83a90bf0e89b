"""What ``estimate`` predicts follows from the tokens that the engine would compute."""

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.planning.configs import CONFIGS
from verl_pg_plugin.architectures import text_skeleton
from verl_pg_plugin.cli.estimate import ACCURACY
from verl_pg_plugin.layout import Sequences
from verl_pg_plugin.planning import forecast as forecasts
from verl_pg_plugin.planning.activation_level import Level, Levels, Room
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.planning.forecast import COMPILED, Forecast, batch_of_lengths, forecast
from verl_pg_plugin.planning.memory import TokenBytes, WeightBytes

FLOPS = ModelFlops.of(text_skeleton(CONFIGS["4b"]))
SIZES = TokenBytes.of(CONFIGS["4b"])
LEVELS = Levels(sizes=SIZES)
P, R, N, G = 2048, 256, 8, 4
GROUPS = batch_of_lengths([P] * G, [[R] * N] * G)
WHOLE, TIGHT = G * N * (P + R), P + 2 * R


def predict(batch: Sequences = GROUPS, budget: int = WHOLE, levels: Levels = LEVELS, **settings: Any) -> Forecast:
    return forecast(batch, FLOPS, levels, budget, **{"compile_layers": False, **settings})


def test_tokens_are_those_of_groups_that_share_their_prompt() -> None:
    found = predict()
    assert (found.logical_tokens, found.physical_tokens) == (G * N * (P + R), G * (P - 1 + N * R))
    assert found.micro_batches == 1
    assert found.old_log_prob == pytest.approx(found.flop_ratio, rel=0.02), "nothing is cut, so only the parts differ"
    assert found.update > found.old_log_prob, "attention's outputs are kept for the backward"


def test_a_budget_that_cuts_groups_costs_and_carrying_costs_less_than_computing_again() -> None:
    carried, again = predict(budget=TIGHT), predict(budget=TIGHT, carry=False)
    assert carried.physical_tokens == predict().physical_tokens
    assert again.physical_tokens > carried.physical_tokens
    assert again.update < carried.update < predict().update
    assert carried.activation_gib < predict().activation_gib


def test_recomputed_attention_and_missing_checkpoints_change_the_update_alone() -> None:
    recomputing = predict(levels=replace(LEVELS, asked=Level.INPUTS))
    assert recomputing.update < predict().update
    assert recomputing.old_log_prob == predict().old_log_prob
    kept = predict(levels=replace(LEVELS, asked=Level.ALL))
    assert kept.alone[1] < predict().alone[1]
    assert recomputing.activation_gib < predict().activation_gib < kept.activation_gib


def test_a_group_above_the_budget_stays_whole_where_the_host_holds_it_within_stock_memory() -> None:
    levels = replace(LEVELS, room=Room(device=1e12, host=1e12))
    on_host = predict(budget=TIGHT, levels=levels)
    split = predict(budget=TIGHT, levels=replace(levels, asked=Level.ATTENTION))
    assert (on_host.micro_batches, on_host.level) == (G, Level.ATTENTION_ON_HOST)
    assert split.micro_batches > G
    assert on_host.old_log_prob == split.old_log_prob, "where nothing is kept both are split, as in the engine"
    assert on_host.update > split.update
    assert on_host.host_gib == pytest.approx((P - 1 + N * R) * SIZES.held(Level.ATTENTION) / 2**30)
    assert split.host_gib == 0


@pytest.mark.parametrize(("prompts", "responses"), [([], []), ([4], [[]]), ([4], [[0]]), ([0], [[4]])])
def test_a_batch_without_a_sequence_or_a_response_is_refused(prompts: list[int], responses: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="token"):
        batch_of_lengths(prompts, responses)


def test_sharing_alone_leaves_compiled_layers_out() -> None:
    found, eager = predict(budget=TIGHT, compile_layers=True), predict(budget=TIGHT)
    assert found.sharing_alone == eager.sharing_alone == eager.update
    assert found.update > eager.update


@pytest.mark.parametrize(
    ("prompt", "response", "n", "peak"),
    [(8192, 1024, 8, 18.79), (8192, 1024, 4, 18.18), (1024, 2000, 8, 19.06)],
    ids=str,
)
def test_memory_is_what_an_h200_held(prompt: int, response: int, n: int, peak: float) -> None:
    """Of benchmarks/data: bfloat16 weights, gradients and SGD, of which a first update has no gradients yet."""
    module, found = text_skeleton(CONFIGS["4b"]), predict(batch_of_lengths([prompt], [[response] * n]), budget=20480)
    weights = sum(weight.numel() for weight in module.parameters())
    held = found.peak_gib(WeightBytes.of(module, num_gpus=1)) - (16 - 2) * weights / 2**30
    assert held == pytest.approx(peak, rel=0.1)
    assert held > 0.96 * peak, "a budget that does not fit would be recommended"


def test_predictions_are_fitted_to_two_thirds_of_the_cases_of_an_h200_and_judged_on_the_rest(monkeypatch) -> None:
    """The figures that ``estimate`` names for its accuracy."""
    flops = {name: ModelFlops.of(text_skeleton(CONFIGS[name])) for name in ("0.6b", "4b", "8b")}

    @cache
    def with_speeds(compiled: float, kernel: float, model: str, case: str, activations: str) -> Forecast:
        monkeypatch.setattr(forecasts, "COMPILED", compiled)
        monkeypatch.setitem(forecasts.KERNEL_SPEEDS, "any", kernel)
        prompt, response, n, groups = map(int, case.split(","))
        batch = batch_of_lengths([prompt] * groups, [[response] * n] * groups)
        levels = Levels(Level(activations) if activations else None, TokenBytes.of(CONFIGS[model]))
        return forecast(batch, flops[model], levels, 40960 if prompt > 8192 else 20480, kernel="any")

    known = dict(forecasts.KERNEL_SPEEDS)
    rows, cases = [], []
    for row in csv.DictReader((Path(__file__).parents[2] / "docs/data/updates.csv").open()):
        path, _, given = row["path"].partition(":")
        model = row["model"].removeprefix("qwen3-")
        of_lengths = row["case"].replace(",", "").isdecimal()
        unlike = row["speedup"] == "nan" or "lora" in row["options"] or "H200" not in row["device"]
        if path.partition("/")[0] != "packed" or model not in flops or not of_lengths or unlike:
            continue
        options = dict(option.split("=") for option in given.split(",") if option)
        speedup = "update" if row["phase"] == "update_actor" else "old_log_prob"
        # Of stock verl's time: all, and twice what is saved with layers or the kernel twice as fast.
        total, faster_layers, faster_kernel = (
            1 / getattr(with_speeds(*speeds, model, row["case"], options.get("activations", "")), speedup)
            for speeds in ((1, 1), (2, 1), (1, 2))
        )
        parts = total, 2 * (total - faster_layers), 2 * (total - faster_kernel)
        rows.append((*parts, row["layers_compiled"] == "True", known[row["kernel"]] > 1, float(row["speedup"])))
        cases.append((model, row["case"]))
    total, layers, attention, compiled, is_fast, measured = np.array(rows).T

    def errors(of_compiled: float, of_kernel: float) -> np.ndarray:
        saved = layers * compiled * (1 - 1 / of_compiled) + attention * is_fast * (1 - 1 / of_kernel)
        return np.abs(1 / (total - saved) / measured - 1)

    different = list(dict.fromkeys(cases))
    held_out = np.array([different.index(case) % 3 == 2 for case in cases])
    grid = np.arange(1, 3, 0.05)
    best = min(((a, b) for a in grid for b in grid), key=lambda speeds: errors(*speeds)[~held_out].mean())
    assert best == pytest.approx((COMPILED, known["flash_attn_4"]))
    every = errors(*best)
    fitted, judged = every[~held_out], every[held_out]
    large = every[[model != "0.6b" for model, _ in cases]]
    num_judged = len(different) // 3
    assert (
        f"fitted to {len(different) - num_judged} cases of Qwen3-0.6B to 8B on an H200, median error "
        f"{np.median(fitted):.0%}; on {num_judged} others {np.median(judged):.0%}; at most {every.max():.0%}, above 1B "
        f"{large.max():.0%}"
    ) == ACCURACY
