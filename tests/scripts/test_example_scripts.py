"""The files that examples/run_qwen3_pg.sh makes are what verl and transformers read."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from data.arithmetic_reward import compute_score
from make_tiny_checkpoint import TOOL_CALL_MARKS, answer_by_tool, character_tokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_only_the_exact_answer_scores_one() -> None:
    scores = {"12": 1.0, "": 0.0, "ab": 0.0, "34": 0.2, "13": 0.35, "120": 0.4, "1": 0.35, "1a": 0.25}
    for result, last, score in ("12", "12", 1.0), ("12", "", 0.0), ("8", "12", 1.0), ("12", "34", 0.2):
        scores[f"<tool_call>7</tool_call>\ntool\n{result}\nassistant\n{last}"] = score
    for response, score in scores.items():
        assert compute_score("arithmetic", response, "12", extra_info={}) == pytest.approx(score), response


def test_tool_calls_are_read_by_verls_parser() -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(TOOL_CALL_MARKS)
    call, result, answer = answer_by_tool("3+4=", "7")
    assert [fitted for _, fitted in (call, result, answer)] == [True, False, True]
    ids = tokenizer(call[0], add_special_tokens=False).input_ids
    content, calls = asyncio.run(ToolParser.get_tool_parser("hermes", tokenizer).extract_tool_calls(ids))
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [("add", {"a": 3, "b": 4})]
    assert "tool_call" not in content
    assert len(ids) < 60, "marks are one token each"


@pytest.mark.parametrize(
    ("loggers", "code", "stream", "said"),
    [
        ("[console, tensorboard]", 0, "stdout", "no run summary: trainer.logger="),
        ("[console, file]", 1, "stderr", "trainer.logger"),
    ],
)
def test_summary_without_metrics_fails_only_if_there_should_be_some(tmp_path, loggers, code, stream, said) -> None:
    roles = "actor_rollout_ref: {actor: {use_prefix_grouper: true}, model: {use_remove_padding: true}}"
    (tmp_path / "config.yaml").write_text(f"{roles}\ntrainer: {{logger: {loggers}}}\n")
    command = [sys.executable, SCRIPTS / "run_summary.py", "none.jsonl", "--config", tmp_path / "config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    (line,) = getattr(done, stream).splitlines()
    assert said in line
