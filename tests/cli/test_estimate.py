"""``python -m verl_pg_plugin estimate``: what would be gained on lengths, a data set, or rollouts that verl wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen3Config

from tests.support import save_tiny_model
from verl_pg_plugin.__main__ import main
from verl_pg_plugin.config import layer_compiler

TEMPLATE = "{% for message in messages %}a a a {{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(path)
    words = Tokenizer(WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3, "d": 4}, unk_token="<eos>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


def estimate(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["estimate", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_lengths_give_a_table_json_and_a_picture(capsys, model: str, tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    code, out, err = estimate(
        capsys, "--model", model, "--prompt", 64, "--response", 16, "--n", 8, "--groups", 2,
        "--budget", 100, 400, "--gen-seconds", 1, "--json", figures, "--plot", picture,
    )  # fmt: skip
    assert (code, err) == (0, "")
    tight, wide = json.loads(figures.read_text())
    assert (tight["budget"], wide["budget"]) == (100, 400)
    assert tight["logical_tokens"] == 2 * 8 * 80
    assert wide["physical_tokens"] == 2 * (63 + 8 * 16)
    assert 1 < tight["update"] < wide["update"]
    assert 1 < wide["step"] < wide["update"], "generation is not faster"
    assert f"{wide['update']:.2f}x" in out
    assert "best budget: actor_rollout_ref.actor.ppo_max_token_len_per_gpu=400" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_memory_picks_the_budget(capsys, model: str) -> None:
    lengths = ("--model", model, "--prompt", 64, "--response", 16, "--n", 8, "--budget", 100, 400)
    assert "no budget keeps its activations within 1e-09 GiB" in estimate(capsys, *lengths, "--memory-gib", 1e-9)[1]
    assert "ppo_max_token_len_per_gpu=400" in estimate(capsys, *lengths, "--memory-gib", 1)[1]


def test_a_data_set_goes_through_the_chat_template_and_shares_its_preamble(capsys, model: str, tmp_path: Path) -> None:
    prompts = [[{"role": "user", "content": content}] for content in ("b c", "b d", "c")]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "data.parquet")
    figures = tmp_path / "figures.json"
    data = ("--data", tmp_path / "data.parquet", "--response", 4, "--n", 2, "--budget", 100)
    code, out, _ = estimate(capsys, "--model", model, *data, "--json", figures)
    assert code == 0
    assert "3 prompts of 4 to 5 tokens" in out
    (found,) = json.loads(figures.read_text())
    assert found["logical_tokens"] == 2 * (9 + 9 + 8)
    # "a a a" begins all prompts and "b" two; a row is shared where the next token is equal as well.
    assert found["physical_tokens"] == (2 + 1 + 1 + 1 + 1) + 6 * 4


def test_rollouts_of_verl_are_read_by_their_prompts(capsys, model: str, tmp_path: Path) -> None:
    lines = [
        {"input": "a b", "output": "c d", "uid": "x_0_0", "score": 1.0},
        {"input": "a b", "output": "d", "uid": "x_1_0", "score": 0.0},
        {"input": "c", "output": "c c c", "uid": "y_0_0", "score": 0.0},
    ]
    (tmp_path / "9.jsonl").write_text("not read")
    (tmp_path / "10.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = tmp_path / "figures.json"
    code, out, _ = estimate(capsys, "--model", model, "--rollouts", tmp_path, "--budget", 100, "--json", figures)
    assert code == 0
    assert "2 of 2 groups of 10.jsonl; the dump is text without special tokens" in out
    assert json.loads(figures.read_text())[0]["logical_tokens"] == (2 + 2) + (2 + 1) + (1 + 3)


LENGTHS = [
    {"step": 9, "uid": uid, "session": session, "turn": 0, "prompt_len": 20, "response_len": 6, "common_prompt_len": 0}
    for uid in ("x", "y")
    for session in (0, 1)
]
TEXT = [{"input": "a b", "output": "c d", "uid": "x_0_0", "score": 1.0}]


def dump(file: Path, lines: list[dict]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("folder", [".", "lengths"])
def test_exact_lengths_are_taken_before_text_of_the_same_step(capsys, model: str, tmp_path: Path, folder: str) -> None:
    dump(tmp_path / "9.jsonl", TEXT)
    dump(tmp_path / "lengths" / "9.jsonl", LENGTHS)
    figures = tmp_path / "figures.json"
    asked = ("--model", model, "--rollouts", tmp_path / folder, "--budget", 100, "--json", figures)
    code, out, _ = estimate(capsys, *asked)
    assert code == 0
    assert "2 of 2 groups of lengths/9.jsonl: exact lengths, written by the trainer" in out
    (found,) = json.loads(figures.read_text())
    assert (found["logical_tokens"], found["physical_tokens"]) == (4 * 26, 2 * (19 + 2 * 6))
    assert "1 of 2 groups of lengths/9.jsonl" in estimate(capsys, *asked, "--groups", 1)[1]
    assert json.loads(figures.read_text())[0]["logical_tokens"] == 2 * 26


def test_text_of_a_later_step_is_taken_before_exact_lengths_of_an_earlier_run(
    capsys, model: str, tmp_path: Path
) -> None:
    dump(tmp_path / "10.jsonl", TEXT)
    dump(tmp_path / "lengths" / "9.jsonl", LENGTHS)
    out = estimate(capsys, "--model", model, "--rollouts", tmp_path, "--budget", 100)[1]
    assert "1 of 1 groups of 10.jsonl; the dump is text without special tokens" in out


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            ("--prompt", 4, "--response", 4, "--plot", "/no/such/x.png"),
            "--plot /no/such/x.png: there is no folder /no/such",
        ),
        (("--prompt", 4, "--response", 4, "--json", "/no/such/x.json"), "there is no folder /no/such"),
        (("--data", "/no/such.parquet", "--response", 4), "--data /no/such.parquet: no such file"),
    ],
    ids=["plot", "json", "data"],
)
def test_files_that_cannot_be_read_or_written_are_named_with_the_cause(capsys, model, asked, message) -> None:
    code, _, err = estimate(capsys, "--model", model, *asked)
    assert code == 2
    assert message in err


def test_lengths_of_an_earlier_run_do_not_pass_for_those_of_the_text_that_a_stock_run_wrote_over_it(
    capsys, model: str, tmp_path: Path
) -> None:
    dump(tmp_path / "9.jsonl", [{**TEXT[0], "uid": "of another run_0_0"}])
    dump(tmp_path / "lengths" / "9.jsonl", LENGTHS)
    out = estimate(capsys, "--model", model, "--rollouts", tmp_path, "--budget", 100)[1]
    assert "1 of 1 groups of 9.jsonl; the dump is text without special tokens" in out


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_len": "abc"},
        {"prompt_len": 20.7},
        {"prompt_len": -3},
        {"response_len": -1},
        {"common_prompt_len": 21},
        {"uid": ["x"]},
        {"turn": None},
    ],
    ids=str,
)
def test_numbers_that_are_no_lengths_are_named_with_their_line(capsys, model: str, tmp_path: Path, wrong: dict) -> None:
    dump(tmp_path / "lengths" / "9.jsonl", [LENGTHS[0], {**LENGTHS[1], **wrong}])
    code, _, err = estimate(capsys, "--model", model, "--rollouts", tmp_path)
    assert code == 2
    assert "lengths/9.jsonl, line 2 holds no lengths of a row" in err


def test_a_response_of_no_token_is_one_token_as_it_is_in_text(capsys, model: str, tmp_path: Path) -> None:
    dump(tmp_path / "lengths" / "9.jsonl", [LENGTHS[0], {**LENGTHS[1], "response_len": 0}])
    figures = tmp_path / "figures.json"
    code, _, _ = estimate(capsys, "--model", model, "--rollouts", tmp_path, "--budget", 100, "--json", figures)
    assert code == 0
    assert json.loads(figures.read_text())[0]["logical_tokens"] == (20 + 6) + (20 + 1)


def test_a_line_separator_of_unicode_in_a_response_ends_no_line(capsys, model: str, tmp_path: Path) -> None:
    line = json.dumps({**TEXT[0], "output": "c\u2028d"}, ensure_ascii=False)
    (tmp_path / "9.jsonl").write_text(line + "\n\n", encoding="utf-8")
    assert "1 of 1 groups of 9.jsonl" in estimate(capsys, "--model", model, "--rollouts", tmp_path, "--budget", 100)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("[]\n", "line 1 is no JSON object"), ('{"uid": "x', "line 1 is no JSON"), ("{}\n", "no in")],
)
def test_a_dump_that_is_not_whole_is_named(capsys, model: str, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "3.jsonl").write_text(text)
    code, _, err = estimate(capsys, "--model", model, "--rollouts", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "3.jsonl" in err
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give lengths by one of --prompt, --data and --rollouts"),
        (("--prompt", 4, "--rollouts", "."), "give lengths by one of"),
        (("--prompt", 4), "--response is missing"),
        (
            ("--prompt", 64, "--response", 8, "--budget", 16),
            "--budget 16 does not hold the longest sequence of 72 tokens",
        ),
        (("--data", "no_such.parquet", "--response", 8), "--data no_such.parquet: "),
        (("--rollouts", "no_such_folder"), "has no .jsonl file; train with trainer.rollout_data_dir=<folder>"),
    ],
)
def test_what_is_missing_is_one_line(capsys, model: str, arguments: tuple[object, ...], message: str) -> None:
    code, out, err = estimate(capsys, "--model", model, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_models_that_are_not_there_or_do_not_share_are_named(capsys, tmp_path: Path) -> None:
    lengths = ("--prompt", 64, "--response", 8)
    assert "is neither a folder nor in the cache" in estimate(capsys, "--model", "nobody/nothing", *lengths)[2]
    config = Qwen3Config(num_hidden_layers=2, attention_dropout=0.1, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path)
    assert (
        "packed mode does not run it: the model's config says attention_dropout=0.1"
        in estimate(capsys, "--model", tmp_path, *lengths)[2]
    )


def test_layers_are_forecast_compiled_where_they_would_be(capsys, model: str, tmp_path: Path, monkeypatch) -> None:
    def update(*options: str) -> float:
        figures = tmp_path / "figures.json"
        lengths = ("--model", model, "--prompt", 64, "--response", 16, "--budget", 400, "--json", figures)
        assert estimate(capsys, *lengths, *options)[0] == 0
        return json.loads(figures.read_text())[0]["update"]

    assert update() == update("--compile-layers", "True") > update("--compile-layers", "False")
    monkeypatch.setattr(layer_compiler, "COMPILED_TYPES", frozenset())
    assert update() == update("--compile-layers", "False")


def test_kept_activations_are_forecast_with_their_memory(capsys, model: str, tmp_path: Path) -> None:
    def figures(*options: str) -> dict:
        file = tmp_path / "figures.json"
        lengths = ("--model", model, "--prompt", 64, "--response", 16, "--budget", 400, "--json", file)
        assert estimate(capsys, *lengths, *options)[0] == 0
        return json.loads(file.read_text())[0]

    default, all_kept = figures(), figures("--keep-activations", "all")
    assert all_kept["update"] > default["update"]
    assert all_kept["activation_gib"] > default["activation_gib"]
    assert figures("--keep-activations", "1e-9") == default, "no layer fits"


def test_layers_of_experts_are_not_guessed(capsys, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    lengths = ("--model", tmp_path, "--prompt", 64, "--response", 8)
    assert estimate(capsys, *lengths)[0] == 0
    code, _, err = estimate(capsys, *lengths, "--keep-activations", "5")
    assert code == 2
    assert (
        "--keep-activations 5.0: what a layer of qwen3_moe holds is known for attention with a dense MLP alone" in err
    )


def test_kept_activations_of_layers_that_are_not_compiled_have_no_forecast(capsys, model: str) -> None:
    lengths = ("--model", model, "--prompt", "4", "--response", "4")
    code, _, err = estimate(capsys, *lengths, "--keep-activations", "all", "--compile-layers", "False")
    assert code == 2
    assert "--keep-activations all: what a layer holds is known for compiled ones alone" in err


@pytest.mark.parametrize("value", ["auto", "most", "0", "-1", "inf", "nan"])
def test_kept_activations_are_attention_all_or_a_number_of_gib(capsys, model: str, value: str) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "--model", model, "--prompt", "4", "--response", "4", "--keep-activations", value])
    assert f"--keep-activations: {value} is neither attention nor all nor GiB above 0" in capsys.readouterr().err
