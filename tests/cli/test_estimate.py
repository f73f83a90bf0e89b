"""``python -m verl_pg_plugin estimate``: what would be gained on lengths, a data set, or rollouts that verl wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.config.config_support import save_checkpoint, save_tokenizer
from tests.support import save_tiny_model
from verl_pg_plugin.__main__ import main
from verl_pg_plugin.cli import estimate as command

Estimate = Callable[..., tuple[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qwen3")
    save_tokenizer(path, preamble="a a a ")
    return save_tiny_model(path)


@pytest.fixture
def estimate(capsys, monkeypatch, model: str) -> Estimate:
    """What the command writes, or the one line of its error, and the figures of its table."""
    shown = Mock(wraps=command.table)
    monkeypatch.setattr(command, "table", shown)

    def run(arguments: str, model: object = model) -> tuple[str, Any]:
        shown.reset_mock()
        code = main(["estimate", "--model", str(model), *arguments.split()])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "") or (code, err) == (0, "")
        assert not err or (err.startswith("error: ") and err.count("\n") == 1)
        return out or err, shown.call_args.args[0] if shown.called else []

    return run


def test_lengths_tell_what_sharing_gains_and_the_fastest_budget(estimate: Estimate) -> None:
    out, (tight, wide) = estimate("--prompt 64 --response 16 --n 8 --groups 2 --budget 100 400 --gen-seconds 1")
    assert (tight["budget"], wide["budget"]) == (100, 400)
    assert tight["logical_tokens"] == 2 * 8 * 80
    assert wide["physical_tokens"] == 2 * (63 + 8 * 16)
    assert 1 < tight["update"] < wide["update"]
    assert 1 < wide["step"] < wide["update"], "generation is not faster"
    removed, gain, budget, lengths, _ = out.split("\n", 4)
    assert removed == "sharing removes 70% of 1,280 tokens: 3.35x fewer"
    assert gain.startswith(f"step {wide['step']:.2f}x as fast; update {wide['update']:.2f}x, of which sharing alone")
    keys = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=400"
    assert budget.startswith(f"fastest budget that fits: {keys}, with")
    assert lengths.startswith("2 groups of 8 responses of 16 tokens to a prompt of 64")


def test_verls_budget_is_a_line_of_the_table_where_it_holds_a_sequence(estimate: Estimate) -> None:
    out, _ = estimate("--prompt 64 --response 16")
    assert [line.split("  ")[0] for line in out.splitlines() if "yes" in line] == ["1024", "16384 (verl)"]


def test_a_data_set_goes_through_the_chat_template_and_shares_its_preamble(estimate: Estimate, tmp_path: Path) -> None:
    prompts = [[{"role": "user", "content": content}] for content in ("b c", "b d", "c")]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "data.parquet")
    data = f"--data {tmp_path}/data.parquet --response 4 --n 2 --budget 100"
    out, (found,) = estimate(data)
    assert "3 prompts of 4 to 5 tokens" in out
    assert found["logical_tokens"] == 2 * (9 + 9 + 8)
    # "a a a" begins all prompts and "b" two; a row is shared where the next token is equal as well.
    assert found["physical_tokens"] == (2 + 1 + 1 + 1 + 1) + 6 * 4
    assert "has no column messages: --prompt-key <" in estimate(f"{data} --prompt-key messages")[0]
    refusing = save_checkpoint(tmp_path)
    save_tokenizer(refusing, preamble="{{ raise_exception('no user') }}")
    assert "the model's chat template refuses a prompt: no user" in estimate(data, refusing)[0]


def test_rollouts_of_verl_are_read_by_their_prompts(estimate: Estimate, tmp_path: Path) -> None:
    lines = [
        {"input": "a b", "output": "c\u2028d", "uid": "x_0_0", "score": 1.0},  # which ends no line
        {"input": "a b", "output": "d", "uid": "x_1_0", "score": 0.0},
        {"input": "c", "output": "c c c", "uid": "y_0_0", "score": 0.0},
    ]
    (tmp_path / "9.jsonl").write_text("not read")
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "10.jsonl").write_text(text + "\n", encoding="utf-8")
    out, (found,) = estimate(f"--rollouts {tmp_path} --budget 100")
    assert "2 of 2 groups of 10.jsonl, as text without special tokens" in out
    assert found["logical_tokens"] == (2 + 2) + (2 + 1) + (1 + 3)


@pytest.mark.parametrize(
    ("arguments", "dump", "message"),
    [
        ("", "", "give lengths by one of --prompt, --data and --rollouts"),
        ("--prompt 4 --rollouts .", "", "give lengths by one of"),
        ("--prompt 4", "", "--response is missing"),
        ("--prompt 64 --response 8 --budget 16", "", "--budget 16 does not hold the longest sequence of 72 tokens"),
        ("--data no_such.parquet --response 8", "", "--data no_such.parquet: no such file"),
        ("--data {folder}/3.jsonl --response 8", "{}", "3.jsonl: not a parquet file: "),
        ("--rollouts no_such_folder", "", "--rollouts no_such_folder: no such folder"),
        ("--rollouts {folder}/..", "", "has no .jsonl file; train with trainer.rollout_data_dir=<folder>"),
        ("--rollouts {folder}", "", "3.jsonl is empty"),
        ("--rollouts {folder}", "[]\n", "3.jsonl, line 1, has no"),
        ("--rollouts {folder}", '{"uid": "x', "3.jsonl, line 1, has no"),
        ("--rollouts {folder}", "\n{}\n", "3.jsonl, line 2, has no input"),
        ("--rollouts {folder}", '{"input": "", "output": "c"}', "at least one token of a prompt and one of a response"),
    ],
)
def test_what_is_missing_is_named(estimate: Estimate, tmp_path: Path, arguments: str, dump: str, message: str) -> None:
    (tmp_path / "3.jsonl").write_text(dump)
    told, _ = estimate(arguments.format(folder=tmp_path))
    assert told.startswith("error: ")
    assert message in told


def test_no_budget_is_recommended_that_does_not_fit_the_memory(estimate: Estimate) -> None:
    lengths = "--prompt 64 --response 16 --n 8 --budget 100 400"
    out, _ = estimate(f"{lengths} --gpu-gib 1e-3")
    assert "no budget fits into this memory" in out
    assert "ppo_max_token_len_per_gpu=" not in out
    out, _ = estimate(f"{lengths} --gpu-gib 80 --gpus 2")
    assert "assumed: 2 GPUs of 80 GiB" in out
    assert "fsdp2 (fsdp gains as much); flash_attn_2; layers compiled (++prefix_grouper.compile_layers=auto" in out
    assert "ppo_max_token_len_per_gpu=400" in out


def test_models_that_are_not_there_or_do_not_share_are_named(estimate: Estimate, tmp_path: Path, monkeypatch) -> None:
    lengths = "--prompt 64 --response 8"
    for path in ("/nope", "../nope", "runs/models/nope", "nope/"):
        assert f"--model {path}: no such folder; pass the folder of a checkpoint" in estimate(lengths, model=path)[0]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    told, _ = estimate(lengths, model="nobody/nothing")
    assert told.startswith("error: --model nobody/nothing cannot be read by AutoConfig: Cannot reach")
    assert "hf download nobody/nothing --include" in told
    dropout = Qwen3Config(num_hidden_layers=2, attention_dropout=0.1, architectures=["Qwen3ForCausalLM"])
    experts = Qwen3MoeConfig(num_hidden_layers=2, num_experts_per_tok=0, architectures=["Qwen3MoeForCausalLM"])
    for config, why in (
        (dropout, "attention_dropout=0.0: the model's config says attention_dropout=0.1"),
        (experts, "qwen3_moe has experts, and its config says neither num_experts_per_tok"),
    ):
        config.save_pretrained(tmp_path)
        assert why in estimate(lengths, model=tmp_path)[0]


def test_the_fastest_budget_is_named_and_not_the_one_that_gains_most_over_stock(estimate: Estimate) -> None:
    out, _ = estimate("--prompt 64 --response 4 --n 2 --budget 300 1300")
    rows = [line.split() for line in out.splitlines() if line.startswith(("300", "1300"))]
    gains = {row[0]: float(row[7][:-1]) for row in rows}
    assert gains["300"] > gains["1300"]
    assert "ppo_max_token_len_per_gpu=1300" in out
