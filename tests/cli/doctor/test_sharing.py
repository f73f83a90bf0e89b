"""The doctor's estimate of what groups share, and of budgets that cut them, is what the engine does."""

from pathlib import Path

import numpy as np
import pytest
from verl_pg_plugin.cli.doctor.overrides import compose_config
from verl_pg_plugin.cli.doctor.sharing import Group, Limit, flop_bound, sharing, sharing_model

from tests.cli.doctor.support import ACTOR, CPU_ONLY, REF, ROLLOUT
from tests.support import save_tiny_model
from verl_pg_plugin.batching.micro_batches import MicroBatchLimits, cut_micro_batches
from verl_pg_plugin.layout import build_packed_layout, build_prefix_order

pytestmark = CPU_ONLY


def test_a_budget_that_holds_a_group_is_no_warning(packed: list[str]) -> None:
    section = sharing(compose_config(packed))
    rows = {row[0]: row[1] for row in section.rows}
    assert section.problems == ()
    assert rows["its tokens"] == "2047 instead of 5120, 2.50x fewer"
    assert rows[f"{ACTOR}.ppo_max_token_len_per_gpu"] == "8192 tokens per GPU: holds a whole group"


def test_a_budget_smaller_than_a_group_is_told_and_no_problem_while_its_parts_are_carried(packed: list[str]) -> None:
    section = sharing(compose_config([*packed, f"{ACTOR}.ppo_max_token_len_per_gpu=1600"]))
    rows = {row[0]: row[1] for row in section.rows}
    assert section.problems == ()
    assert rows[f"{ACTOR}.ppo_max_token_len_per_gpu"].endswith("holds a part of a group, cut in 2")
    assert "hand on what they share" in rows["prefix_grouper.carry"]


def test_parts_that_each_compute_the_prompt_again_are_a_warning(packed: list[str]) -> None:
    never = [*packed, f"{ACTOR}.ppo_max_token_len_per_gpu=1600", "prefix_grouper.carry=never"]
    (warning,) = sharing(compose_config(never)).problems
    assert warning.is_warning
    assert "cut in up to 2 parts" in warning.what
    assert sharing(compose_config([*never, warning.fix])).problems == ()


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.n=four",
        f"{ROLLOUT}.n=0",
        "data.max_response_length=abc",
        f"{ACTOR}.ppo_max_token_len_per_gpu=8k",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=-1",
        f"{ACTOR}.ulysses_sequence_parallel_size=0",
    ],
)
def test_a_count_that_is_none_leaves_no_estimate_and_no_traceback(packed: list[str], override: str) -> None:
    (row,) = sharing(compose_config([*packed, override])).rows
    assert row[0] == "estimate"


def test_the_reference_policy_has_a_budget_only_where_there_is_one(packed: list[str]) -> None:
    def keys(*overrides: str) -> set[str]:
        return {row[0] for row in sharing(compose_config([*packed, *overrides])).rows}

    assert keys(f"{ACTOR}.use_kl_loss=True") - keys() == {f"{REF}.log_prob_max_token_len_per_gpu"}


def test_a_budget_smaller_than_a_sequence_holds_none(packed: list[str]) -> None:
    rows = dict(sharing(compose_config([*packed, f"{ACTOR}.ppo_max_token_len_per_gpu=1200"])).rows)
    assert rows[f"{ACTOR}.ppo_max_token_len_per_gpu"].endswith("holds not even one sequence")


def test_fixed_micro_batches_that_cut_groups_are_a_warning_where_nothing_is_carried(packed: list[str]) -> None:
    fixed = [f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"]
    assert sharing(compose_config([*packed, *fixed])).problems == ()
    (warning,) = sharing(compose_config([*packed, *fixed, "prefix_grouper.carry=never"])).problems
    assert f"{ACTOR}.ppo_micro_batch_size_per_gpu=2" in warning.what


def test_modes_that_share_nothing_have_no_budget_to_warn_of(packed: list[str]) -> None:
    section = sharing(compose_config([*packed, f"{ACTOR}.use_prefix_grouper=False", f"{ROLLOUT}.n=64"]))
    assert section.problems == ()
    assert section.rows[-1][0] == "in force"


# The estimate is what the engine does


def real_group(group: Group) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(10, 90, group.prompt)
    rows = [np.concatenate([prompt, [i], rng.integers(10, 90, group.response - 1)]) for i in range(group.n)]
    return np.concatenate(rows), np.arange(group.n + 1) * (group.prompt + group.response)


@pytest.mark.parametrize("group", [Group(prompt=7, response=3, n=4), Group(1, 1, 1), Group(5, 9, 1), Group(12, 2, 9)])
def test_rows_of_a_group_are_those_of_its_layout(group: Group) -> None:
    tokens, offsets = real_group(group)
    assert build_packed_layout(tokens, offsets, np.full(group.n, group.prompt)).num_rows == group.num_rows


@pytest.mark.parametrize("value", [9, 12, 14, 15, 18, 30])
@pytest.mark.parametrize("sp_size", [1, 2])
def test_parts_of_a_group_are_those_that_the_engine_cuts(value: int, sp_size: int) -> None:
    group = Group(prompt=7, response=3, n=5)
    limit = Limit("key", value, counts_rows=True, sp_size=sp_size)
    tokens, offsets = real_group(group)
    parts = cut_micro_batches(build_prefix_order(tokens, offsets), MicroBatchLimits(max_rows=value * sp_size))
    assert limit.parts(group) == len(parts)
    assert Limit("key", 8, counts_rows=True).parts(group) == 0


@pytest.mark.parametrize(
    "key", [f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"]
)
def test_ranks_that_share_a_sequence_multiply_the_budget_whichever_key_sets_them(packed: list[str], key: str) -> None:
    rows = {row[0]: row[1] for row in sharing(compose_config([*packed, f"{key}=2"])).rows}
    shared = "8192 tokens per GPU, shared by 2 GPUs: holds a whole group"
    assert rows[f"{ACTOR}.ppo_max_token_len_per_gpu"] == shared


def test_flop_bound_needs_a_checkpoint_and_grows_with_the_group(packed: list[str]) -> None:
    config = compose_config(packed)
    bounds = [flop_bound(sharing_model(config), Group(prompt=512, response=16, n=n)) for n in (1, 2, 8)]
    assert 1.0 < bounds[0] < 1.1, "with nothing shared, the head alone runs on fewer tokens"
    assert bounds[0] < bounds[1] < 2.1 < bounds[2] < 8.0
    wide = compose_config([*packed, "+actor_rollout_ref.model.override_config.intermediate_size=4096"])
    assert flop_bound(sharing_model(wide), Group(prompt=512, response=16, n=8)) != bounds[2], "the override counts"
    config.actor_rollout_ref.model.path = "Qwen/Qwen3-4B"
    assert sharing_model(config) is None


def test_a_head_that_is_not_cut_in_chunks_is_a_remark(packed: list[str], tmp_path: Path) -> None:
    def remark(*overrides: str) -> str | None:
        section = sharing(compose_config([*packed, *overrides]))
        assert section.problems == ()
        return dict(section.rows).get("prefix_grouper.logits_chunk_size")

    cohere = f"actor_rollout_ref.model.path={save_tiny_model(tmp_path, 'cohere', pad_token_id=0)}"
    assert remark() is None
    assert "logits of all response rows are held at once (CohereForCausalLM changes" in (remark(cohere) or "")
    assert remark(cohere, "prefix_grouper.logits_chunk_size=0") is None
    assert remark(cohere, f"{ACTOR}.use_prefix_grouper=False") is None
