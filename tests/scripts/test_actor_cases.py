"""Agent-like batches of the actor benchmark are the chains and trees that their names say, and are refused by name."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from benchmarks.actor_cases import AnyCase, Work, parse_case, samples_of_ranks

from verl_pg_plugin.mixers import PairCost
from verl_pg_plugin.planning.cost import ModelFlops

FLOPS = ModelFlops(per_token=1000.0, per_label=100.0, pairs=(PairCost(1.0),))


def work(case: AnyCase, world_size: int = 1) -> tuple[Work, int]:
    rows = case.rows(vocab_size=1 << 30, world_size=world_size)
    parts = samples_of_ranks(rows, False, FLOPS, world_size)
    return Work.of([[rows.samples[row] for row in part] for part in parts], FLOPS, checkpointing=True), len(rows.group)


def test_ten_turns_are_ten_rows_of_which_each_is_computed_as_far_as_it_is_new() -> None:
    """A chain of 2,000 prompt, 200 reply and 800 tool tokens a turn."""
    found, rows = work(parse_case("agent:2000,200,800,10,1,1"))
    assert rows == 10
    assert found.logical_tokens == 67_000
    assert found.physical_tokens == 11_200 - 1


def test_a_search_tree_has_a_row_for_every_leaf_and_computes_every_step_once() -> None:
    found, rows = work(parse_case("tree:100,5,4,4,1"))
    assert rows == 4**4
    assert found.logical_tokens == 4**4 * (100 + 4 * 5)
    # Siblings fork one row early, so each computes that row anew; the last token of a leaf needs none.
    assert found.physical_tokens == 99 + 4 * 5 + 4**2 * 5 + 4**3 * 5 + 4**4 * 5


def test_a_preamble_is_computed_once_for_all_prompts() -> None:
    found, rows = work(parse_case("preamble:50,10,4,3,5"))
    assert rows == 15
    assert found.physical_tokens == 49 + 5 * 10 + 15 * 4


@pytest.mark.parametrize("text", ["agent:20,2,8,3,4,2", "tree:9,5,4,4,1", "preamble:5,10,4,3,5", "4096,ln:1024,4-16,8"])
def test_a_case_is_written_into_the_csv_as_it_is_read_from_the_command_line(text: str) -> None:
    assert str(parse_case(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("agent:20,2,8,3,4", "write agent:P,REPLY,TOOL,TURNS,n,groups"),
        ("tree:9,5,4,0,1", "positive"),
        ("agents:20,2,8,3,4,1", "agent, tree, preamble"),
    ],
)
def test_a_case_that_is_none_is_refused_with_its_fields(text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        parse_case(text)


def test_ranks_get_whole_sessions_and_as_many_rows_each() -> None:
    rows = parse_case("agent:20,2,8,3,2,2").rows(vocab_size=1 << 30, world_size=2)
    parts = samples_of_ranks(rows, False, FLOPS, 2)
    assert [len(part) for part in parts] == [12, 12]
    assert not set(rows.group[parts[0]]) & set(rows.group[parts[1]])
    assert [len(set(rows.session[part])) for part in parts] == [4, 4]
