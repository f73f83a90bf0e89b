"""Cases of the benchmarks are what their names say, and what they count and compare is right."""

import argparse
import csv
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_attention import main as bench_attention
from bench_longest_prompt import bisect
from benchmarks.actor_cases import AnyCase, Work, batch_of_phase, parse_case, samples_of_ranks
from benchmarks.actor_engines import EnginePath
from benchmarks.kernel_time import ATTENTION, COLLECTIVES, IDLE, MATMUL, seconds_by_class
from benchmarks.shapes import config_of
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from verl_pg_plugin.architectures import skeleton
from verl_pg_plugin.mixers import PairCost
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.synthetic import Sample, make_batch

FLOPS = ModelFlops(per_token=1000.0, per_label=100.0, pairs=(PairCost(1.0),))


@pytest.mark.parametrize("script", ["bench_actor", "bench_packing"])
def test_a_script_that_no_test_runs_finds_what_it_imports(script: str) -> None:
    importlib.import_module(script)


def work(case: AnyCase) -> tuple[int, int, int]:
    """Sequences, their tokens, and packed tokens."""
    rows = case.rows(vocab_size=1 << 30, world_size=1)
    found = Work.of([rows.samples], FLOPS, checkpointing=True)
    return len(rows.group), found.logical_tokens, found.physical_tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A chain of 2,000 prompt, 200 reply and 800 tool tokens a turn.
        ("agent:2000,200,800,10,1,1", (10, 67_000, 11_200 - 1)),
        # Siblings fork one token early, so each computes that token anew; the last token of a leaf needs none.
        ("tree:100,5,4,4,1", (4**4, 4**4 * (100 + 4 * 5), 99 + 4 * 5 + 4**2 * 5 + 4**3 * 5 + 4**4 * 5)),
        ("preamble:50,10,4,3,5", (15, 15 * 64, 49 + 5 * 10 + 15 * 4)),
        ("40,8,3,2", (6, 6 * 48, 2 * (39 + 3 * 8))),
    ],
)
def test_a_case_shares_what_it_says(text: str, expected: tuple[int, int, int]) -> None:
    assert work(parse_case(text)) == expected
    assert str(parse_case(text)) == text


def test_ranks_get_whole_sessions_and_as_many_rows_each() -> None:
    rows = parse_case("agent:20,2,8,3,2,2").rows(vocab_size=1 << 30, world_size=2)
    parts = samples_of_ranks(rows, False, FLOPS, 2)
    assert [len(part) for part in parts] == [12, 12]
    assert not set(rows.group[parts[0]]) & set(rows.group[parts[1]])
    assert [len(set(rows.session[part])) for part in parts] == [4, 4]


def test_distillation_has_a_possible_teacher_and_sft_learns_the_responses() -> None:
    batch = make_batch([Sample([1, 2, 3], [4, 5]), Sample([1, 2, 3], [6])])
    taught = batch_of_phase(batch, "distill", 4, vocab_size=9)
    assert all(len(set(ids)) == 4 for ids in taught["teacher_ids"].values().tolist())
    assert taught["teacher_logprobs"].values().exp().sum(-1).max() < 1
    supervised = batch_of_phase(batch, "sft", 4, vocab_size=9)
    assert supervised["loss_mask"].values().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert not {"prompts", "responses", "teacher_ids"} & set(supervised.keys())


def test_a_path_is_read_as_it_is_written_and_names_its_strategy() -> None:
    for text in ("rmpad", "rmpad/fsdp", "packed/fsdp:carry=never@12288", "packed:compile_layers=False"):
        assert str(EnginePath.parse(text)) == text
    assert EnginePath.parse("packed/fsdp").strategy == "fsdp"
    for text in ("packed/ddp", "rmpad:carry=never", "flat"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            EnginePath.parse(text)


def test_the_bound_of_the_moe_shape_counts_the_three_billion_weights_that_a_token_visits() -> None:
    module = skeleton(config_of("qwen3-30b-a3b"))
    assert sum(weight.numel() for weight in module.parameters()) == pytest.approx(30.5e9, rel=0.01)
    flops = ModelFlops.of(module)
    assert (flops.per_token + flops.per_label) / 2 == pytest.approx(3.04e9, rel=0.02), "and no lookup table"


@pytest.mark.parametrize("longest", [0, 16384, 20000, 65536, 90000, 163840, 10**6])
def test_the_longest_prompt_that_fits_is_found_to_within_the_tokens_asked(longest: int) -> None:
    rows = list(bisect(lambda p: SimpleNamespace(prompt=p, fits=p <= longest), 16384, 163840, within=4096))
    fitting = [row.prompt for row in rows if row.fits]
    if longest < 16384:
        assert not fitting
    else:
        assert 0 <= min(longest, 163840) - max(fitting) <= 4096
    assert len(rows) <= 2 + 6


def kernel(name: str, start: float, end: float) -> FunctionEvent:
    on_gpu = DeviceType.CUDA
    return FunctionEvent(id=0, name=name, thread=0, start_us=start, end_us=end, use_device="cuda", device_type=on_gpu)


def test_seconds_of_a_profile_are_counted_by_class_and_idle_is_when_no_stream_ran() -> None:
    events = [
        kernel("nvjet_tst_a", 100, 200),
        kernel("ncclDevKernel_AllGather", 150, 300),
        kernel("nvjet_tst_b", 210, 220),
        kernel("flash_fwd_kernel", 350, 400),
    ]
    expected = {COLLECTIVES: 150e-6, MATMUL: 110e-6, ATTENTION: 50e-6, IDLE: 50e-6}
    assert seconds_by_class(events) == pytest.approx(expected)


def test_attention_is_timed_alone_and_packed_and_both_are_compared_with_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--device", "cpu", "--dtype", "float32"]
    cases, table = ["--cases", "48,16,4,2", "tree:9,3,2,3"], tmp_path / "attention.csv"
    paths = ["--paths", "packed:sdpa", "alone:sdpa", "--repeats", "1", "--csv", str(table)]
    monkeypatch.setattr(sys, "argv", ["bench_attention.py", *shape, *cases, *paths])
    assert bench_attention() == 0
    with table.open() as file:
        rows = {(row["case"], row["path"]): row for row in csv.DictReader(file)}
    assert len(rows) == 4
    assert all(float(row["error"]) < 1e-5 for row in rows.values())
    shared = 47 * 48 // 2 + 4 * (16 * 47 + 16 * 17 // 2)
    assert float(rows["48,16,4,2", "packed:sdpa"]["bound"]) == pytest.approx(4 * (63 * 64 // 2) / shared)
