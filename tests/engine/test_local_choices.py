"""Ranks whose machines differ: who is named, with what fix. Two processes do it in ``test_two_ranks.py``."""

from dataclasses import replace

import pytest

import verl_pg_plugin.engine.shared_prefix_engine  # noqa: F401  (else a patched name would be imported for good)
from tests.support import make_engine, save_tiny_model
from verl_pg_plugin.engine import ranks
from verl_pg_plugin.engine.local_choices import RanksDifferError, Told, describe_differences

FAST = Told("a", ("flash_attn_2", "auto"), ("layers compiled", "tested"), frozenset({"flash_attn_2", "torch_varlen"}))
SLOW = replace(FAST, host="b", kernel=("torch_varlen", "no flash-attn"), runnable=frozenset({"torch_varlen", "sdpa"}))
PLAIN = replace(FAST, host="b", layers=("layers not compiled", "no gcc"))


def test_ranks_that_chose_alike_go_on_whatever_their_reasons() -> None:
    others = replace(FAST, host="b", kernel=("flash_attn_2", "by name"), layers=("layers compiled", "by name"))
    assert describe_differences([FAST, others, FAST]) == ""


def test_every_rank_and_machine_is_named_with_its_kernel_and_the_fastest_that_all_can_run() -> None:
    assert describe_differences([FAST, FAST, SLOW, FAST, FAST, FAST]) == (
        "ranks decided differently, as their machines differ: attention kernels: flash_attn_2 on ranks 0-1, 3-5 of a "
        "(auto), torch_varlen on rank 2 of b (no flash-attn); give all machines what some lack, or set "
        "++prefix_grouper.attention_kernel=torch_varlen, which all can run"
    )


def test_no_kernel_is_advised_that_some_rank_cannot_run() -> None:
    told = describe_differences([FAST, replace(SLOW, runnable=frozenset({"sdpa"}))])
    assert told.endswith("give all machines what some lack")


def test_two_machines_that_lack_different_things_for_the_compiler_are_told_apart() -> None:
    told = describe_differences([FAST, PLAIN, replace(PLAIN, host="c", layers=("layers not compiled", "no Python.h"))])
    assert told == (
        "ranks decided differently, as their machines differ: layers compiled on rank 0 of a (tested), layers not "
        "compiled on rank 1 of b (no gcc), layers not compiled on rank 2 of c (no Python.h); give all machines what "
        "some lack, or set ++prefix_grouper.compile_layers=False"
    )


def test_differences_of_both_kinds_are_named_at_once() -> None:
    told = describe_differences([FAST, replace(SLOW, layers=PLAIN.layers)])
    assert "prefix_grouper.attention_kernel=torch_varlen" in told
    assert "prefix_grouper.compile_layers=False" in told


@pytest.mark.usefixtures("process_group")
def test_an_engine_whose_peer_decided_otherwise_is_not_built(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_ranks(value: tuple, group: object) -> list[tuple]:
        failure, told = value
        return [value, (failure, told and replace(told, layers=("layers compiled", "tested")))]

    monkeypatch.setattr(ranks, "over_ranks", over_ranks)
    with pytest.raises(RanksDifferError, match=r"layers not compiled on rank 0 .*compile_layers=False"):
        make_engine(save_tiny_model(tmp_path), packed=True)
