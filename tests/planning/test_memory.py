"""Bytes of an update, and the level a micro-batch takes: what fits in stock verl fits, and the fastest is taken."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import transformers

from tests.architectures.tiny_configs import tiny_config
from tests.planning.configs import CONFIGS
from verl_pg_plugin.architectures import text_skeleton
from verl_pg_plugin.layout import PrefixOrder
from verl_pg_plugin.mixers import MIXERS
from verl_pg_plugin.planning.activation_level import DEVICE_RESERVE, OVER_STOCK, Level, Levels, Room
from verl_pg_plugin.planning.memory import TokenBytes, WeightBytes, cache_weights
from verl_pg_plugin.planning.micro_batches import MicroBatchLimits, cut_micro_batches, tokens_of_stock

GIB = 2**30
SIZES = {name: TokenBytes.of(config) for name, config in CONFIGS.items()}
ROOM = Room(device=40 * GIB, host=100 * GIB)
LEVELS = Levels(sizes=SIZES["4b"], room=ROOM)


@cache
def weights_of(name: str, num_gpus: int) -> WeightBytes:
    return WeightBytes.of(text_skeleton(CONFIGS[name]), num_gpus)


def test_what_fits_in_stock_verl_fits_here() -> None:
    """Random models, cards, ranks and batches; the largest micro-batch at the level that is chosen."""
    draw = random.Random(0)
    fitting = 0
    worst = [0.0, 0.0]
    taken = set()
    for _ in range(20_000):
        name, gpus = draw.choice(list(SIZES)), draw.choice((1, 2, 4, 8, 16, 32))
        sizes, weights = SIZES[name], weights_of(name, gpus)
        fused = draw.random() < 0.3
        card, host = draw.choice((38, 78, 138)) * GIB, draw.choice((0, 20 * GIB, 200 * GIB))
        prompt = draw.choice((512, 2048, 8192, 16384, 32768, 65536))
        response = draw.choice((256, 1024, 4096))
        n = draw.choice((1, 2, 4, 8, 16, 32))
        budget = max(prompt + response, draw.choice((8192, 16384, 32768, 65536)))
        stock = tokens_of_stock(np.full(2 * n, prompt + response), MicroBatchLimits(budget))
        if weights.fixed + stock * sizes.stock(fused) > card:
            continue
        fitting += 1
        levels = Levels(sizes=sizes, room=weights.room(card, host), fused_kernels=fused).within_stock(stock)
        group = whole = prompt - 1 + n * response
        pending = 0
        if group > budget and not levels.keeps_whole(group, prompt - 1, prompt + response - 1):
            pending, takes = prompt - 1, cache_weights(levels, forward_only=False)
            group = int(budget - takes.published * pending)
            group = -(-whole // -(-whole // max(group, 1)))  # chunks become of one size
            if group < (alone := prompt - 1 + response):  # a chunk of one sequence, which publishes if that fits
                pending *= takes.alone(alone) + takes.published * pending <= budget
                group = alone
        level = levels.choose(group, pending=pending)
        taken.add(level)
        assert not level.on_host or group * sizes.held(level) <= host
        config, labels = CONFIGS[name], min(group, n * response)
        # Few labels run the LM head at once, and verl's fused kernel 9,504 words of the vocabulary.
        head = 2 * (config.vocab_size * config.hidden_size + labels * (9504 if fused else config.vocab_size))
        head = weights.head if labels > 4096 and not fused else head
        kept = group * sizes.waiting(level) + sizes.beside(pending=pending)
        used = weights.fixed + kept + max(head, group * sizes.working(level))
        worst[host > 0] = max(worst[host > 0], used / card)
    assert fitting > 10_000
    assert worst[True] <= 1, "a run that fits in stock verl does not fit here"
    assert worst[False] <= 1.01, "without memory of the host the sizes alone decide, which err by as much"
    assert taken == {Level.ATTENTION, Level.ATTENTION_ON_HOST, Level.INPUTS, Level.INPUTS_ON_HOST}


def test_the_fastest_level_that_fits_is_taken_and_the_smallest_where_none_does() -> None:
    sizes, levels = SIZES["4b"], replace(LEVELS, room=replace(ROOM, host=1e15))
    most = [int(ROOM.device // sizes.on_device(level)) for level in levels.ladder]
    assert [levels.choose(tokens) for tokens in most] == list(levels.ladder)
    assert [levels.choose(tokens + 1) for tokens in most] == [*levels.ladder[1:], Level.INPUTS_ON_HOST]
    assert levels.choose(most[0], cached=1000) is levels.choose(most[0], pending=1000) is Level.ATTENTION_ON_HOST
    assert replace(levels, logits_at_once=True).choose(most[0], labels=1000) is Level.ATTENTION_ON_HOST


def test_a_host_without_room_is_left_alone() -> None:
    held = SIZES["4b"].held(Level.ATTENTION)
    for host, level in ((100_000 * held, "attention_on_host"), (99_999 * held, "inputs_on_host"), (0, "inputs")):
        assert replace(LEVELS, room=replace(ROOM, host=host)).choose(100_000).value == level
    assert replace(LEVELS, room=replace(ROOM, host=-1.0)).choose(10) is Level.ATTENTION, "which offloaded weights fill"
    inputs = SIZES["4b"].held(Level.INPUTS)
    some = cache_weights(Levels(sizes=SIZES["4b"], room=Room(-1.0, 1000 * inputs, GIB)), forward_only=False)
    assert some.alone(1001) / 1001 == pytest.approx(328 / 514, rel=0.01), "on the device"
    assert some.alone(1000) < 0.6 * some.alone(1001)
    none = cache_weights(replace(LEVELS, room=Room(1.0, 1.0)).within_stock(10**6), forward_only=False)
    assert none.on_host == 1, "a sequence that fits the budget fits"


def test_what_is_asked_for_is_taken_and_offload_means_levels_on_the_host() -> None:
    assert all(replace(LEVELS, asked=level).choose(10**9) is level for level in Level)
    assert replace(LEVELS, host_alone=True).choose(10) is Level.ATTENTION_ON_HOST
    assert Levels().choose(10**9) is Level.ATTENTION, "on a CPU nothing waits on the host by itself"
    assert Levels(host_alone=True).choose(10) is Level.ATTENTION_ON_HOST


def test_no_more_is_taken_than_stock_verl_would_and_a_tenth() -> None:
    most = OVER_STOCK * 10_000 * SIZES["4b"].stock() / SIZES["4b"].on_device(Level.ATTENTION)
    for tokens, level in ((int(most), Level.ATTENTION), (int(most) + 1, Level.ATTENTION_ON_HOST)):
        assert LEVELS.within_stock(10_000).choose(tokens) is level
        assert LEVELS.within_stock(10**9).choose(tokens) is Level.ATTENTION
    assert replace(LEVELS, fused_kernels=True).within_stock(10_000).stock < LEVELS.within_stock(10_000).stock
    assert SIZES["0.6b"].stock(fused_kernels=True) < SIZES["0.6b"].on_device(Level.INPUTS), "stock gathers no keys"


def test_ranks_that_share_tokens_share_their_bytes() -> None:
    both, most = replace(LEVELS, ranks=2), int(ROOM.device // SIZES["4b"].on_device(Level.ATTENTION))
    assert (LEVELS.choose(2 * most), both.choose(2 * most)) == (Level.ATTENTION_ON_HOST, Level.ATTENTION)
    assert both.within_stock(1000).stock == LEVELS.within_stock(500).stock


def test_room_is_what_weights_and_a_reserve_leave() -> None:
    weights = weights_of("4b", 8)
    room, reserve = weights.room(80 * GIB, 7.0), DEVICE_RESERVE * 80 * GIB
    assert room == Room(80 * GIB - reserve - weights.fixed - weights.head, 7.0, reserve + weights.head)
    assert weights_of("8b", 1).room(80 * GIB, 0).device < 0
    kept = WeightBytes.of(text_skeleton(CONFIGS["4b"]), 8, keeps_gradients=True)
    assert kept.gathered - weights.gathered == 7 * weights.gradients, "those of all GPUs, until the last micro-batch"
    assert replace(LEVELS, room=Room(30, 0, reserve=10), stock=80).shortage == 2, "the reserve counts"


def micro_batches(prompt: int, response: int, n: int, budget: int, levels: Levels, others: int = 0) -> int:
    """Of a group, and of others of one short sequence each."""
    lengths, shared = [prompt + response] * n + [16] * others, [0] + [prompt - 1] * (n - 1) + [0] * others
    order = PrefixOrder(np.arange(n + others), np.array(lengths) - 1, np.array(shared))
    limits = MicroBatchLimits(budget)
    levels = levels.within_stock(tokens_of_stock(np.array(lengths), limits))
    return sum(map(len, cut_micro_batches(order, limits, levels=levels)))


NO_HOST = replace(LEVELS, room=replace(ROOM, host=0.0))
LONG, WIDE = (32768, 1024, 16), (8192, 1024, 64)
STAYS = (32768, 1024, 27)  # of 60,415 tokens, where 1.57 budgets take what stock verl does
LITTLE = 40_000.0 * SIZES["4b"].on_device(Level.INPUTS)


def test_a_group_above_the_budget_stays_whole_where_a_host_level_holds_it() -> None:
    assert micro_batches(*LONG, 40960, LEVELS) == 1
    assert micro_batches(*LONG, 40960, LEVELS, others=2300) == 2, "it is one micro-batch, not those of its tokens"
    assert micro_batches(*LONG, 40960, NO_HOST) == 1, "inputs take less than stock"
    assert micro_batches(*LONG, 40960, replace(LEVELS, asked=Level.ATTENTION)) > 1
    assert micro_batches(*LONG, 40960, Levels()) > 1, "without figures of memory the budget holds"


def test_a_group_that_exceeds_stock_memory_is_split_but_where_its_split_would_take_more() -> None:
    """The chunk that computes the prompt holds the sums of its gradients."""
    assert micro_batches(*WIDE, 18432, LEVELS) > 1
    tight = replace(LEVELS, room=replace(ROOM, device=30_000 * SIZES["4b"].on_device(Level.INPUTS_ON_HOST)))
    assert micro_batches(8192, 1024, 32, 18432, tight) > 1
    assert micro_batches(*STAYS, 33792, NO_HOST) == 1
    assert micro_batches(*STAYS, 33792, replace(NO_HOST, logits_at_once=True)) > 1
    assert micro_batches(61, 5, 1000, 4096, NO_HOST) == 1, "all share a prefix that is short for the budget"
    assert micro_batches(*STAYS, 33792, replace(NO_HOST, room=Room(LITTLE, host=0))) > 1, "each chunk by itself fits"
    assert micro_batches(*STAYS, 33792, replace(NO_HOST, room=Room(LITTLE / 2, host=0))) == 1, "nothing fits"
    few_share_much = PrefixOrder(np.arange(3), np.full(3, 33_790), np.array([0, 1000, 32_767]))
    tight = replace(NO_HOST, room=Room(LITTLE / 2, host=0))
    assert len(cut_micro_batches(few_share_much, MicroBatchLimits(33_792), levels=tight)) > 1
    assert len(cut_micro_batches(few_share_much, MicroBatchLimits(max_sequences=2), levels=LEVELS)) == 2
    assert micro_batches(1024, 1024, 16, 4096, NO_HOST) > 1
    assert micro_batches(8192, 1024, 20, 10_000, replace(NO_HOST, ranks=2, room=Room(1.0, host=0))) > 1


def test_stock_verl_makes_as_few_micro_batches_as_it_can_and_evens_them() -> None:
    lengths = np.full(8, 100)
    assert tokens_of_stock(lengths, MicroBatchLimits(300)) == 267
    assert tokens_of_stock(lengths, MicroBatchLimits(100)) == 100
    assert tokens_of_stock(lengths, MicroBatchLimits(max_sequences=3)) == 300


def test_an_8b_config_takes_580_kib_a_token_and_432_kib_a_cached_one() -> None:
    sizes = SIZES["8b"]
    assert sizes.held(Level.ATTENTION) == sizes.held(Level.ATTENTION_ON_HOST) == 36 * 1024 * (8 + 8 + 0.125)
    assert (sizes.beside(cached=1), sizes.beside(pending=1)) == ((144 + 288) * 1024, 288 * 1024)
    weights = cache_weights(Levels(sizes=sizes), forward_only=False)
    assert weights.cached == pytest.approx(0.745, abs=0.002)
    assert weights.published == pytest.approx(0.497, abs=0.002)
    assert weights.recomputing == pytest.approx(8 / 16.125), "the layer's input alone"
    asked = cache_weights(Levels(Level.ATTENTION, sizes), forward_only=False)
    assert asked == replace(weights, recomputing=1.0, on_host=1.0), "no other level than the one that is asked for"
    of_log_probs = cache_weights(Levels(sizes=sizes), forward_only=True)
    assert of_log_probs.cached == of_log_probs.published == pytest.approx(144 / 580.5, abs=0.001), "without sums"
    assert of_log_probs.alone(1000) == 0, "nothing is kept of what is computed"
    more = TokenBytes.of(CONFIGS["8b"], compiled=False).gradients - sizes.gradients
    assert more == 2 * (12288 + 4 * 4096 + 2 * 5120), "of the MLP, of norms, of queries and keys"


def test_tokens_that_keep_less_make_cached_ones_dearer_and_those_that_keep_all_cheaper() -> None:
    levels = (Level.ATTENTION_ON_HOST, Level.INPUTS, Level.ATTENTION, Level.ALL)
    cached = [cache_weights(Levels(level, SIZES["8b"]), forward_only=False).cached for level in levels]
    assert cached[:2] == [pytest.approx(1.5)] * 2
    assert cached == sorted(cached, reverse=True)


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    # all, attention, attention_on_host, inputs, inputs_on_host, stock verl
    [("4b", (3_900, 627, 171, 328, 154, 514)), ("8b", (4_950, 773, 211, 473, 195, 640))],
)
def test_levels_take_what_was_measured(name: str, kilobytes: tuple[int, ...]) -> None:
    of_all, *others = (SIZES[name].on_device(level) / 1000 for level in Level)
    assert of_all == pytest.approx(kilobytes[0], rel=0.05)
    assert [*others, SIZES[name].stock() / 1000] == pytest.approx(kilobytes[1:], rel=0.01)


def test_latent_attention_caches_narrow_values_as_wide_as_its_keys() -> None:
    assert TokenBytes.of(tiny_config("deepseek_v3")).key_value == 4 * (24 + 24) * 2
    sizes, kinds = TokenBytes.of(hybrid := tiny_config("qwen3_next")), hybrid.layer_types
    assert sizes.caching_layers == kinds.count("full_attention") < len(kinds)
    states, inputs = MIXERS["gated_delta"].state_sizes(hybrid)
    assert (sizes.state, sizes.state_sums) == (4 * states + 2 * inputs, 4 * (states + inputs))
    assert sizes.beside(states=1, pending_states=1) == sizes.state + 2 * sizes.state_sums


def test_a_config_without_sizes_counts_cached_tokens_as_the_most_there_is() -> None:
    assert TokenBytes.of(transformers.PretrainedConfig()) is None
    weights = cache_weights(Levels(), forward_only=False)
    assert (weights.cached, weights.published) == (3, 2)
    assert cache_weights(Levels(), forward_only=True).alone(1000) == 0
