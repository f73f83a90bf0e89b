"""Groups that exceed a micro-batch go on in the next one, and every number stays that of the sequence alone."""

from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from tests.engine.carried_cases import (
    CASES,
    DUPLICATES,
    MIXED,
    ONE_GROUP,
    carry_always,
    carrying,
    carrying_engine,
    split_groups,
)
from tests.engine.test_moe import MODELS as EXPERTS
from tests.support import (
    assert_same,
    check_exact,
    critic_batch,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
    update,
)
from verl_pg_plugin.attention.cache import OUTPUTS, PrefixCache
from verl_pg_plugin.planning.micro_batches import CacheWeights
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")


BY_SEQUENCES = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}


def by_tokens(budget: int) -> dict[str, int]:
    return {"max_token_len_per_gpu": budget}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def engine(qwen3: str, process_group: None) -> Any:
    return carrying_engine(qwen3)


def batch_of(case: str) -> TensorDict:
    samples, budget = CASES[case]
    return make_batch(samples, max_token_len_per_gpu=budget, calculate_sum_pi_squared=True)


@pytest.mark.parametrize("case", CASES)
def test_carried_groups_are_exact_in_both_phases(qwen3: str, engine: Any, case: str) -> None:
    """Those of the update too, where the chunks run in reverse."""
    batch = batch_of(case)
    expected = run_reference(qwen3, batch)
    with carrying(engine):
        assert_same(run_engine(engine, batch), expected)
        assert_same(update(engine, batch, return_model_output=True), expected)


ALWAYS_REDUCED = {"use_no_sync_for_gradient_accumulation": False, "reshard_after_forward": False}
WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3}
WAYS: dict[str, tuple[str, dict, dict, list[Sample], dict]] = {
    "groups above a number of sequences": ("qwen3", {}, {}, MIXED, BY_SEQUENCES | {"micro_batch_size_per_gpu": 3}),
    "a chunk that begins with a duplicate": ("qwen3", {}, {}, DUPLICATES, BY_SEQUENCES),
    "cached tokens in the budget": ("qwen3", {}, {"weights": CacheWeights(1.0, 0.5)}, MIXED, by_tokens(64)),
    "every micro-batch reduced": ("qwen3", {}, {"engine": ALWAYS_REDUCED}, MIXED, by_tokens(56)),
    "windows": ("qwen3", WINDOW, {}, MIXED, by_tokens(56)),
    "experts": ("qwen3_moe", EXPERTS["qwen3_moe"], {}, ONE_GROUP, by_tokens(36)),
}
"""A model and its sizes, the engine, samples and how they are cut."""


@pytest.mark.parametrize("way", WAYS)
def test_split_groups_are_exact(tmp_path: Path, way: str) -> None:
    """Other options meet split groups in tests/options/test_matrix.py, compiled layers in test_compiled_layers.py."""
    model_type, sizes, options, samples, cut = WAYS[way]
    path = save_tiny_model(tmp_path, model_type, **sizes)
    engine = carrying_engine(path, **options)
    with carrying(engine):
        check_exact(engine, path, make_batch(samples, **cut))


@pytest.mark.parametrize(("owed", "carries"), [(0.75, True), (1.5, False)])
def test_a_number_of_sequences_bounds_the_memory_of_what_is_cached_too(qwen3: str, owed: float, carries: bool) -> None:
    engine = carrying_engine(qwen3, CacheWeights(cached=0.5, published=owed, recomputing=0.5))
    batch = make_batch(ONE_GROUP, **BY_SEQUENCES | {"micro_batch_size_per_gpu": 1})
    assert bool(split_groups(engine, batch, forward_only=False)) == carries


def test_every_row_is_computed_once_with_gradient(qwen3: str, engine: Any) -> None:
    batch = batch_of("one_group_of_8")
    rows = {}
    for carry in ("auto", "never"):
        of = engine if carry == "auto" else make_engine(qwen3, engine={"carry": carry})
        (rows[carry],) = update(of, batch).metrics["prefix_grouper/physical_tokens"]
    assert rows["auto"] == 19 + sum(len(sample.response) for sample in ONE_GROUP)
    assert rows["never"] > rows["auto"] + 19


@pytest.mark.parametrize("outputs", [False, True])
def test_a_gradient_that_is_not_handed_back_is_noticed_here(
    qwen3: str, engine: Any, outputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without pending gradients the case above is far off."""
    pop = PrefixCache.pop

    def forgetful(self: PrefixCache, keep: int) -> list:
        blocks = pop(self, keep)
        for block in blocks:
            for place, pending in block.pending.items():
                if (place == OUTPUTS) == outputs:
                    pending.zero_()
        return blocks

    monkeypatch.setattr(PrefixCache, "pop", forgetful)
    batch = batch_of("a_trie_of_three_levels")
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same(update(engine, batch), run_reference(qwen3, batch))


def test_values_of_cached_tokens_reach_the_critic(value_model: str) -> None:
    engine = make_engine(value_model, critic=True)
    carry_always(engine)
    with carrying(engine):
        check_exact(engine, value_model, critic_batch(MIXED, max_token_len_per_gpu=56))
