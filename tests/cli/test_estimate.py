"""``estimate``: counts from lengths, a data set or rollouts, and the nearest measured update."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig, BertConfig, Qwen3MoeConfig

from tests.config.config_support import save_checkpoint, save_tokenizer
from tests.support import save_tiny_model
from verl_pg_plugin.__main__ import main
from verl_pg_plugin.cli.estimate import MEASURED
from verl_pg_plugin.layout import Sequences
from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.skeleton import text_skeleton

UPDATES = Path(__file__).parents[2] / "docs/data/updates.csv"
LENGTHS = "--prompt 64 --response 16"

Estimate = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qwen3")
    save_tokenizer(path, preamble="a a a ")
    return save_tiny_model(path)


@pytest.fixture
def estimate(capsys, model: str) -> Estimate:
    """Run the command; return its output or its one-line error."""

    def run(arguments: str, model: object = model) -> str:
        code = main(["estimate", "--model", str(model), *arguments.split()])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "") or (code, err) == (0, "")
        assert not err or (err.startswith("error: ") and err.count("\n") == 1)
        return out or err

    return run


def tokens_of(out: str) -> tuple[int, int]:
    (numbers,) = re.findall(r"^tokens: ([\d,]+) in total, ([\d,]+) computed, dedup ratio", out, re.MULTILINE)
    total, computed = (int(number.replace(",", "")) for number in numbers)
    return total, computed


def test_counts_of_lengths_match_the_packed_layout(estimate: Estimate, model: str) -> None:
    prompt, responses = np.arange(64), np.arange(100, 108)
    tokens = np.concatenate([np.append(prompt, np.full(16, response)) for response in responses])
    layout = Sequences(tokens, np.arange(0, 8 * 80 + 1, 80), np.full(8, 64)).build_layout()
    flops = ModelFlops.of(text_skeleton(AutoConfig.from_pretrained(model)))
    total, computed = flops.alone(np.full(8, 80)).sum(), flops.forward([layout])
    out = estimate(LENGTHS)
    assert tokens_of(out) == (layout.num_total_tokens, layout.num_tokens) == (8 * 80, 63 + 8 * 16)
    of_flops = f"{total:.3g} in total, {computed:.3g} computed, FLOP ratio {total / computed:.2f}"
    assert f"FLOPs of a forward: {of_flops}\n" in out
    # Larger lengths need no arrays of tokens.
    out = estimate("--prompt 1000000000 --response 1000000000 --n 8")
    assert tokens_of(out) == (16 * 10**9, 9 * 10**9 - 1)
    assert "-" not in out[out.index("FLOPs") : out.index("FLOP ratio")], "a number of pairs overflows"
    assert "--n=1000001: 1,000,001 sequences are more than 1,000,000. Fix: " in estimate(f"{LENGTHS} --n 1000001")
    for wrong in ("0", "1.5", "1000000001", "9" * 5000):
        with pytest.raises(SystemExit):
            estimate(f"--prompt 64 --response {wrong}")


def test_nearest_measured_update_is_in_the_data(estimate: Estimate) -> None:
    measured, stock = {}, {}
    for row in csv.DictReader(UPDATES.open()):
        if row["phase"] == "update_actor" and row["device"] == "NVIDIA H200":
            kind, _, _ = row["case"].rpartition(":")
            *numbers, prompts = row["case"].removeprefix(f"{kind}:").split(",")
            shape = f"{numbers[-1]} agents of {numbers[-2]} turns"
            if not kind:
                shape = "{} prompt{} of {}, response {}, n {}".format(prompts, "s" * (prompts != "1"), *numbers)
            name = f"Q{row['model'][1:].replace('b', 'B')}, {shape}"
            if row["path"] == "rmpad":
                stock[row["run"], name] = round(float(row["seconds_median"]), 2)
            elif row["path"] == "packed":
                ratio = float(row["total_tokens"]) / float(row["computed_tokens"])
                measured[row["run"], name] = round(ratio, 2), round(float(row["seconds_median"]), 2)
    of_runs = {(name, ratio, stock.get((run, name)), seconds) for (run, name), (ratio, seconds) in measured.items()}
    assert {(name, *figures) for name, figures in MEASURED.items()} <= of_runs
    near, lengths = "measured, not predicted: Qwen3-4B,", "--prompt 8000 --response 1000"
    seconds = "an update on one H200 takes 1.61 s, and 8.85 s in stock verl with rmpad"
    assert f"{near} 1 prompt of 8192, response 1024, n 8: dedup ratio 4.50, {seconds}\n" in estimate(lengths)
    assert f"{near} 4 prompts of 4096, response 1024, n 1: dedup ratio 1.00" in estimate(f"{LENGTHS} --n 1")


def test_data_sets_use_the_chat_template_and_share_its_preamble(estimate: Estimate, tmp_path: Path) -> None:
    prompts = [[{"role": "user", "content": content}] for content in ("b c", "b d", "c", "a b c d")]
    pq.write_table(pa.table({"prompt": prompts, "number": [1, 2, 3, 4]}), tmp_path / "data.parquet")
    data = f"--data {tmp_path}/data.parquet --response 4 --n 2 --groups 3"
    out = estimate(data)
    assert "3 prompts of 4 to 5 tokens\n" in out
    # "a a a" begins all prompts and "b" two; a token is shared where the next one is equal as well.
    assert tokens_of(out) == (2 * (9 + 9 + 8), (2 + 1 + 1 + 1 + 1) + 6 * 4)
    same = [[{"role": "user", "content": "b c"}]] * 3
    pq.write_table(pa.table({"prompt": same}), tmp_path / "same.parquet")
    assert tokens_of(estimate(data.replace("data.parquet", "same.parquet"))) == (6 * 9, 4 + 6 * 4)
    for column in ("messages", "number"):
        error = estimate(f"{data} --prompt-key {column}")
        assert error.startswith(f"error: --data={tmp_path}/data.parquet --prompt-key={column}: ")
        assert error.endswith(" Fix: a parquet file, and its column of messages\n")
    refusing = save_checkpoint(tmp_path)
    save_tokenizer(refusing, preamble="{{ raise_exception('no user') }}")
    assert "TemplateError: no user. Fix: " in estimate(data, refusing)


def test_rollouts_share_equal_text(estimate: Estimate, tmp_path: Path) -> None:
    lines = [
        {"input": "a b", "output": "c\u2028d", "uid": "x_0_0", "score": 1.0},  # \u2028 is no line break in JSON lines
        {"input": "a b", "output": "", "uid": "x_1_0", "score": 0.0},
        {"input": "c", "output": "c c c", "uid": "y_0_0", "score": 0.0},
        {"input": "", "output": "", "uid": f"pad{'0' * 32}_0_0", "score": 0.0},  # verl's padding
    ]
    (tmp_path / "9.jsonl").write_text("not read")
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "10.jsonl").write_text(text + "\n", encoding="utf-8")
    out = estimate(f"--rollouts {tmp_path}")
    assert "3 sequences of 10.jsonl, as text without special tokens\n" in out
    assert tokens_of(out) == ((2 + 2) + (2 + 1) + (1 + 3), (1 + 2) + 1 + 3)
    assert tokens_of(estimate(f"--rollouts {tmp_path} --groups 1")) == (4 + 3, 3 + 1)
    # Later turns share earlier responses.
    turns = [{"input": "a", "output": "b c", "uid": "x_0_0"}, {"input": "a b c d", "output": "d", "uid": "x_0_1"}]
    (tmp_path / "11.jsonl").write_text("\n".join(map(json.dumps, turns)))
    out = estimate(f"--rollouts {tmp_path}")
    assert tokens_of(out) == (3 + 5, 4)
    assert "session" not in out


def test_rollouts_name_sessions_that_break_and_the_ratio_without(estimate: Estimate, tmp_path: Path) -> None:
    reply, query = "a b c d d c b a", "c c"
    turns = [
        {"input": "a", "output": f"c d {reply}", "uid": "x_0_0"},
        {"input": f"a {reply} {query}", "output": "d", "uid": "x_0_1"},  # without the first two tokens of the reply
        {"input": "a", "output": "b", "uid": "x_1_0"},
    ]
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, turns)))
    out = estimate(f"--rollouts {tmp_path}")
    total, computed = 11 + 12 + 2, 10 + 11 + 1  # all differ in the second token
    assert tokens_of(out) == (total, computed)
    assert out.splitlines()[1:5] == [
        "1 of 2 sessions have a turn that does not begin with an earlier turn:"
        f" dedup ratio {total / computed:.2f}, without breaks {total / (computed - 8):.2f}",
        f"session x_0: dedup ratio {23 / 21:.2f}, without breaks {23 / 13:.2f}",
        "  turn 1 differs at token 1 and loses 8 tokens: older tokens left out, by truncation or the template",
        "    after 'a' turn 0 has 'c' 'd a b c d d c b a', turn 1 has 'a' 'b c d d c b a c c'",
    ]


@pytest.mark.parametrize(
    ("arguments", "dump", "message"),
    [
        ("", "", "lengths must come from exactly one source"),
        ("--prompt 4 --rollouts .", "", "lengths must come from exactly one source"),
        ("--prompt 4", "", "Fix: --response <tokens>"),
        ("--data no_such.parquet --response 8", "", "--data=no_such.parquet --prompt-key=prompt: FileNotFoundError"),
        ("--data {folder}/3.jsonl --response 8", "{}", "3.jsonl --prompt-key=prompt: ArrowInvalid"),
        ("--rollouts no_such_folder", "", "--rollouts=no_such_folder: no lines with input and output"),
        ("--rollouts {folder}/..", "", "Fix: the folder that a run named as trainer.rollout_data_dir"),
        *(
            ("--rollouts {folder}", dump, "3.jsonl: no lines with input and output")
            for dump in ("", "[]\n", '{"uid": "x', "\n{}\n", '{"input": 1, "output": "c"}')
        ),
        ("--rollouts {folder}", '{"input": "", "output": "c"}', "prompts need at least one token"),
    ],
)
def test_missing_inputs_are_named(estimate: Estimate, tmp_path: Path, arguments: str, dump: str, message: str) -> None:
    (tmp_path / "3.jsonl").write_text(dump)
    error = estimate(arguments.format(folder=tmp_path))
    assert error.startswith("error: ")
    assert message in error


def test_missing_unsupported_and_uncountable_models_are_named(estimate, tmp_path: Path, monkeypatch) -> None:
    for path in ("/nope", "../nope", "nope/"):
        assert "Fix: --model <folder of a checkpoint>" in estimate(LENGTHS, model=path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert estimate(LENGTHS, model="nobody/nothing").startswith("error: --model=nobody/nothing: ")
    BertConfig(num_hidden_layers=2, is_decoder=False).save_pretrained(tmp_path)
    assert "packed mode refuses the model: bert is an encoder" in estimate(LENGTHS, model=tmp_path)
    kinds = ("dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")
    configs = {kind: AutoConfig.for_model(kind) for kind in kinds}
    configs["qwen3_moe"] = Qwen3MoeConfig(num_hidden_layers=2, num_experts_per_tok=0)
    for kind, config in configs.items():
        config.save_pretrained(tmp_path / kind)
        out = estimate(LENGTHS, model=tmp_path / kind)
        assert tokens_of(out) == (8 * 80, 63 + 8 * 16)
        assert f"FLOPs of {kind} cannot be counted (" in out
