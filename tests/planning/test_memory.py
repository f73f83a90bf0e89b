"""Bytes of an update, groups that stay whole in free memory, and the activation level of a micro-batch."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import transformers

from tests.architectures.tiny_configs import tiny_config
from tests.planning.configs import CONFIGS
from verl_pg_plugin.layout import PrefixOrder
from verl_pg_plugin.mixers import MIXERS
from verl_pg_plugin.planning.activation_level import DEVICE_RESERVE, Level, MemoryBudget
from verl_pg_plugin.planning.activation_policy import ActivationPolicy, cache_weights
from verl_pg_plugin.planning.memory import TokenBytes, WeightBytes
from verl_pg_plugin.planning.micro_batches import SHORT_PREFIX, MicroBatch, MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.skeleton import text_skeleton

GIB = 2**30
SIZES = {name: TokenBytes.of(config) for name, config in CONFIGS.items()}
ROOM = MemoryBudget(device=40 * GIB, host=100 * GIB)
LEVELS = ActivationPolicy(sizes=SIZES["4b"], memory=ROOM)


skeleton_of = cache(lambda name: text_skeleton(CONFIGS[name]))


@cache
def weights_of(name: str, num_gpus: int) -> WeightBytes:
    return WeightBytes.of(skeleton_of(name), num_gpus)


def room_beside(weights: WeightBytes, device: float, host: float) -> MemoryBudget:
    """Return the bytes of a device left by weights, gradients, AdamW and the reserve."""
    reserve = DEVICE_RESERVE * device + weights.head
    fixed = weights.weights + weights.gradients + weights.optimizer + weights.gathered
    return MemoryBudget(device - fixed - reserve, host, reserve)


def plan_group(
    prompt: int, response: int, n: int, budget: int, levels: ActivationPolicy, others: int = 0
) -> list[MicroBatch]:
    """Return micro-batches of an update of one group, and ``others`` of one short sequence each."""
    tokens = np.array([*[prompt - 1 + response] * n, *[8] * others])
    order = PrefixOrder(np.arange(n + others), tokens, np.array([0, *[prompt - 1] * (n - 1), *[0] * others]))
    weights = cache_weights(levels, budget, forward_only=False)
    plan = cut_micro_batches(order, MicroBatchLimits(budget), weights, policy=levels)
    return [part for group in plan for part in group]


def test_groups_stay_whole_if_they_fit_and_other_chunks_fit() -> None:
    """Random models, GPUs, ranks and groups; a single sequence that exceeds the device runs too."""
    draw = random.Random(0)
    taken: Counter[tuple[bool, Level]] = Counter()
    for _ in range(1000):
        name, gpus, ranks = draw.choice(list(SIZES)), draw.choice((1, 2, 4, 8, 16, 32)), draw.choice((1, 2))
        sizes, card, host = SIZES[name], draw.choice((30, 78, 138)) * GIB, draw.choice((0, 20 * GIB, 200 * GIB))
        room = room_beside(weights_of(name, gpus), card, host)
        levels = ActivationPolicy(sizes=sizes, memory=room, ranks=ranks, logits_at_once=draw.random() < 0.3)
        prompt, response = draw.choice((512, 2048, 8192, 32768, 65536)), draw.choice((256, 1024, 4096))
        n = draw.choice((2, 8, 32, 128))
        budget = max(prompt + response, draw.choice((8192, 16384, 32768, 65536)))
        group = prompt - 1 + n * response
        parts = plan_group(prompt, response, n, budget, levels)
        whole = levels.keeps_whole(group, prompt + response - 1)
        if group <= budget or (whole and prompt - 1 > budget // SHORT_PREFIX):
            assert len(parts) == 1
        for part in parts:
            labels, use = min(part.num_tokens, len(part.sequences) * response), {"cached": 0, "pending": 0}
            if part.chunk:
                published = max(part.chunk.num_read_next - part.chunk.num_kept, 0)
                use = {"cached": part.chunk.num_cached, "pending": published}
            level = levels.choose(part.num_tokens, labels, **use)
            assert not level.on_host or levels.host_bytes(level, part.num_tokens) <= host
            bytes_taken = part.num_tokens * sizes.on_device(level) + sizes.cache_bytes(**use)
            bytes_taken += labels * sizes.logits * levels.logits_at_once
            fits = bytes_taken <= room.device * ranks * (1 + 1e-9)
            in_reserve = len(parts) == 1 and bytes_taken <= (room.device + room.reserve) * ranks
            assert fits or in_reserve or group <= budget or (len(part.sequences) == 1 and not any(use.values()))
            taken[len(parts) > 1, level] += fits
    levels_of_auto = ActivationPolicy().ladder
    assert min(taken[split, level] for split in (False, True) for level in levels_of_auto) > 5


def test_the_fastest_level_that_fits_device_and_host_is_chosen() -> None:
    sizes, levels = SIZES["4b"], replace(LEVELS, memory=replace(ROOM, host=1e15))
    *ladder, small = levels.ladder
    most = [int(ROOM.device // sizes.on_device(level)) for level in ladder]
    assert [levels.choose(tokens) for tokens in most] == ladder
    assert [levels.choose(tokens + 1) for tokens in most] == [*ladder[1:], Level.INPUTS_ON_HOST]
    assert replace(levels, memory=replace(ROOM, host=0.0)).choose(most[0] + 1) is small is Level.INPUTS
    assert levels.choose(most[0], cached=1000) is levels.choose(most[0], pending=1000) is Level.ATTENTION_ON_HOST
    assert replace(levels, logits_at_once=True).choose(most[0], labels=1000) is Level.ATTENTION_ON_HOST
    held = SIZES["4b"].saved(Level.ATTENTION)
    for host, level in ((100_000 * held, "attention_on_host"), (99_999 * held, "inputs_on_host"), (0, "inputs")):
        assert replace(LEVELS, memory=replace(ROOM, host=host)).choose(100_000).value == level
    full = replace(LEVELS, memory=replace(ROOM, host=-1.0))
    assert full.choose(10) is Level.ATTENTION, "offloaded weights fill the host"


def test_whole_groups_are_halved_for_other_ranks_and_templates_are_split() -> None:
    order = PrefixOrder(np.arange(16), np.full(16, 33_791), np.array([0, *[32_767] * 15]))
    levels = room_of(10**6, Level.INPUTS)
    for at_least in (1, 2, 4):
        plan = cut_micro_batches(order, MicroBatchLimits(40_960), None, at_least, policy=levels)
        sizes = [len(part.sequences) for group in plan for part in group]
        assert len(sizes) == at_least
        assert max(sizes) <= max(16 // at_least, 8) or at_least == 1
    # 64 prompts of 300 tokens begin with the same 200, and have 8 responses of 500.
    shared = np.tile([200, *[299] * 7], 64)
    shared[0] = 0
    order = PrefixOrder(np.arange(512), np.full(512, 799), shared)
    levels = replace(LEVELS, memory=MemoryBudget(1e15, 1e15))
    plan = cut_micro_batches(order, MicroBatchLimits(16_384), cache_weights(levels, 16_384, False), policy=levels)
    assert max(part.num_tokens for group in plan for part in group) <= 16_384


def test_the_longest_measured_prompt_stays_whole() -> None:
    """90,112 tokens in 32 GiB of one GPU, 4B in bfloat16 with SGD; docs/benchmarks.md."""
    held = weights_of("4b", 1)
    fixed = held.gathered + (held.weights + held.gradients) / 2
    reserve = DEVICE_RESERVE * 32 * GIB + held.head
    room = MemoryBudget(32 * GIB - fixed - reserve, 100.0 * GIB, reserve)
    assert len(plan_group(90_112, 1024, 8, 91_136, replace(LEVELS, memory=room))) == 1


def test_deferred_reduction_keeps_gradients_of_all_gpus() -> None:
    kept, freed = WeightBytes.of(skeleton_of("4b"), 8, keeps_gradients=True), weights_of("4b", 8)
    assert kept.gathered - freed.gathered == 7 * freed.gradients


def test_fixed_levels_offload_and_ranks_decide_the_level() -> None:
    assert all(replace(LEVELS, fixed_level=level).choose(10**9) is level for level in Level)
    assert replace(LEVELS, offload_only=True).choose(10) is Level.ATTENTION_ON_HOST
    assert ActivationPolicy().choose(10**9) is Level.ATTENTION, "a CPU offloads nothing by default"
    assert ActivationPolicy(offload_only=True).choose(10) is Level.ATTENTION_ON_HOST
    both, most = replace(LEVELS, ranks=2), int(ROOM.device // SIZES["4b"].on_device(Level.ATTENTION))
    assert (LEVELS.choose(2 * most), both.choose(2 * most)) == (Level.ATTENTION_ON_HOST, Level.ATTENTION)


LONG = (32768, 1024, 16)  # 49,151 tokens in all


def room_of(tokens: int, level: Level, host: float = 0.0) -> ActivationPolicy:
    """Return the policy of a device that holds a number of tokens at a level."""
    return replace(LEVELS, memory=MemoryBudget(float(tokens * SIZES["4b"].on_device(level)), host))


@pytest.mark.parametrize(
    ("level", "host"),
    [
        (Level.ATTENTION, 0.0),
        (Level.ATTENTION_ON_HOST, 49_151.0 * SIZES["4b"].saved(Level.ATTENTION)),
        (Level.INPUTS_ON_HOST, 49_151.0 * SIZES["4b"].saved(Level.INPUTS)),
        (Level.INPUTS, 0.0),
    ],
)
def test_groups_above_the_budget_stay_whole_if_they_fit(level: Level, host: float) -> None:
    assert len(plan_group(*LONG, 40960, room_of(49_151, level, host))) == 1
    smallest = Level.INPUTS_ON_HOST if host else Level.INPUTS
    assert len(plan_group(*LONG, 40960, room_of(49_150, smallest, host))) > 1
    assert len(plan_group(*LONG, 40960, replace(room_of(49_151, level, host), fixed_level=level))) == 1


def test_groups_that_do_not_fit_are_split_unless_a_sequence_needs_the_reserve() -> None:
    assert len(plan_group(*LONG, 40960, replace(LEVELS, fixed_level=Level.ALL))) > 1, "at a fixed level"
    assert len(plan_group(*LONG, 40960, ActivationPolicy())) > 1, "memory is unknown"
    large = room_of(49_151, Level.INPUTS)
    assert len(plan_group(*LONG, 40960, replace(large, logits_at_once=True))) > 1
    assert len(plan_group(*LONG, 40960, replace(room_of(24_576, Level.INPUTS), ranks=2))) == 1
    assert len(plan_group(*LONG, 40960, large, others=2300)) == 2, "a large group counts as one micro-batch"
    tokens = np.full(3, 33_790)
    order = PrefixOrder(np.arange(3), tokens, np.array([0, 1000, 32_767]))
    assert len(cut_micro_batches(order, MicroBatchLimits(max_sequences=2), policy=LEVELS)) == 2
    # A sequence of 33,791 tokens needs the reserve.
    for fitting, parts in ((33_790, 1), (33_791, 2)):
        levels = room_of(fitting, Level.INPUTS)
        levels = replace(levels, memory=replace(levels.memory, reserve=levels.memory.device))
        assert min(len(plan_group(*LONG, 40960, levels)), 2) == parts


def test_the_token_budget_uses_all_memory_and_defaults_to_long_sequences() -> None:
    sizes = SIZES["4b"]
    room = MemoryBudget(float(20 * GIB), 0.0)
    weights = cache_weights(replace(LEVELS, memory=room, ranks=2), 40_960, forward_only=False)
    share = 2 * room.device / 40_960
    assert weights.computed == weights.alone == pytest.approx(sizes.on_device(Level.INPUTS) / share)
    assert weights.cached == pytest.approx(sizes.cache_bytes(cached=1) / share)
    assert weights.published == pytest.approx(sizes.cache_bytes(pending=1) / share)
    host = replace(room, host=40_960.0 * sizes.saved(Level.INPUTS))
    on_host = cache_weights(replace(LEVELS, memory=host), 40_960, forward_only=False)
    assert on_host.computed == pytest.approx(sizes.on_device(Level.INPUTS_ON_HOST) / room.device * 40_960)
    asked = cache_weights(replace(LEVELS, memory=room, fixed_level=Level.ATTENTION), 40_960, forward_only=False)
    assert asked.computed == pytest.approx(sizes.on_device(Level.ATTENTION) / room.device * 40_960)
    plenty = plan_group(32768, 1024, 400, 40_960, replace(LEVELS, memory=MemoryBudget(55.0 * GIB, 0.0)))
    assert max(part.num_tokens for part in plenty) > 0.95 * 40_960, "the token limit binds, not memory"
    tokens = np.array([5, 50, 7, 40])
    assert MicroBatchLimits(300).budget(tokens) == 300
    assert MicroBatchLimits(max_sequences=2).budget(tokens) == 90
    assert MicroBatchLimits().budget(tokens) == 102


def test_weights_of_an_8b_config_at_every_level() -> None:
    sizes = SIZES["8b"]
    assert sizes.saved(Level.ATTENTION) == sizes.saved(Level.ATTENTION_ON_HOST) == 36 * 1024 * (8 + 8 + 0.125)
    assert (sizes.cache_bytes(cached=1), sizes.cache_bytes(pending=1)) == ((144 + 288) * 1024, 288 * 1024)
    weights = cache_weights(ActivationPolicy(sizes=sizes), 1000, forward_only=False)
    assert weights.cached == pytest.approx(0.745, abs=0.002)
    assert weights.published == pytest.approx(0.497, abs=0.002)
    assert weights.alone == pytest.approx(8 / 16.125), "only the layer inputs"
    fixed = cache_weights(ActivationPolicy(Level.ATTENTION, sizes), 1000, forward_only=False)
    assert fixed == replace(weights, alone=1.0)
    of_log_probs = cache_weights(ActivationPolicy(sizes=sizes), 1000, forward_only=True)
    assert of_log_probs.cached == of_log_probs.published == pytest.approx(144 / 580.5, abs=0.001), "no gradient sums"
    assert of_log_probs.alone == 0, "a forward keeps nothing"
    more = TokenBytes.of(CONFIGS["8b"], compiled=False).gradients - sizes.gradients
    assert more == 2 * (12288 + 4 * 4096 + 2 * 5120), "of the MLP, norms, queries and keys"
    levels = (Level.ATTENTION_ON_HOST, Level.INPUTS, Level.ATTENTION, Level.ALL)
    cached = [cache_weights(ActivationPolicy(level, SIZES["8b"]), 1000, forward_only=False).cached for level in levels]
    assert cached[:2] == [pytest.approx(1.5)] * 2
    assert cached == sorted(cached, reverse=True)


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    # all, attention, attention_on_host, inputs, inputs_on_host
    [("4b", (3_900, 627, 171, 328, 154)), ("8b", (4_950, 773, 211, 473, 195))],
)
def test_level_bytes_match_measurements(name: str, kilobytes: tuple[int, ...]) -> None:
    of_all, *others = (SIZES[name].on_device(level) / 1000 for level in Level)
    assert of_all == pytest.approx(kilobytes[0], rel=0.05)
    assert others == pytest.approx(kilobytes[1:], rel=0.01)


def test_latent_values_hybrid_states_and_configs_without_sizes_are_counted() -> None:
    assert TokenBytes.of(tiny_config("deepseek_v3")).key_value == 4 * (24 + 24) * 2
    sizes, kinds = TokenBytes.of(hybrid := tiny_config("qwen3_next")), hybrid.layer_types
    assert sizes.caching_layers == kinds.count("full_attention") < len(kinds)
    states, inputs = MIXERS["gated_delta"].state_sizes(hybrid)
    assert (sizes.state, sizes.state_sums) == (4 * states + 2 * inputs, 4 * (states + inputs))
    assert sizes.cache_bytes(states=1, pending_states=1) == sizes.state + 2 * sizes.state_sums
    assert TokenBytes.of(transformers.PretrainedConfig()) is None
    weights = cache_weights(ActivationPolicy(), 1000, forward_only=False)
    assert (weights.cached, weights.published, weights.alone, weights.computed) == (3, 2, 1, 1)
    assert cache_weights(ActivationPolicy(), 1000, forward_only=True).alone == 0
