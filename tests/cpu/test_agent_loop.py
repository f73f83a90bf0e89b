"""What a response draws follows from the seed of its request: not from arrival, server or neighbours in the batch."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from verl_pg_plugin.cpu.agent_loop_v1 import PROMPT_SEED, SeededAgentLoopManagerV1, SeededAgentLoopWorkerV1
from verl_pg_plugin.cpu.prompt_seeds import PromptSeeds
from verl_pg_plugin.cpu.sampling import derived_seed

from .test_server import ask, make_server

REPOSITORY = Path(__file__).parents[2]


def test_a_seed_changes_with_run_step_row_and_validation_and_with_nothing_else() -> None:
    def seeds(run: int = 42, step: int = 1, validate: bool = False, rows: tuple[Any, ...] = (3, 4)) -> list[int]:
        return PromptSeeds(run).of(step, validate, list(rows))

    assert seeds() == seeds() == seeds(rows=(4, 3))[::-1]
    others = [seeds(run=43), seeds(step=2), seeds(validate=True), seeds(rows=(5, "4"))]
    everything = [seed for group in [seeds(), *others] for seed in group]
    assert len(set(everything)) == len(everything)
    assert all(0 <= seed < 2**63 for seed in everything)


def test_a_row_that_comes_twice_in_a_step_draws_twice_and_again_so_in_a_resumed_run() -> None:
    """Data sets without ``extra_info.index`` call every row 0."""
    first = PromptSeeds(42)
    one_batch = first.of(7, False, [0, 0, 0])
    assert len(set(one_batch)) == 3
    resumed = PromptSeeds(42)
    assert resumed.of(7, False, [0]) + resumed.of(7, False, [0, 0]) == one_batch
    assert first.of(8, False, [0]) == resumed.of(8, False, [0])


def test_a_seed_is_the_same_in_every_process() -> None:
    assert derived_seed(42, 1, False, 3, 0) == 3439002361853188162


def test_every_session_of_a_prompt_reaches_the_agent_loop_with_a_seed_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    async def record(self: Any, sampling_params: dict[str, Any], trajectory: Any, **kwargs: Any) -> None:
        asked.append({**sampling_params, **kwargs})

    worker_class = SeededAgentLoopWorkerV1.__ray_actor_class__
    monkeypatch.setattr(AgentLoopWorkerTQ.__ray_actor_class__, "_run_agent_loop", record)
    worker = object.__new__(worker_class)
    shared = {"temperature": 1.0}
    for session in (0, 1):
        prompt = {PROMPT_SEED: torch.tensor(5), "uid": "u"}
        asyncio.run(worker._run_agent_loop(shared, {}, session_id=session, **prompt))
    assert [request.pop("seed") for request in asked] == [derived_seed(5, 0), derived_seed(5, 1)]
    assert asked == [{"temperature": 1.0, "session_id": session, "uid": "u"} for session in (0, 1)]
    assert shared == {"temperature": 1.0}, "the params are shared by all sessions of a prompt"


def test_the_manager_gives_every_prompt_its_seed_before_workers_divide_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[TensorDict] = []
    monkeypatch.setattr(AgentLoopManagerTQ, "generate_sequences", lambda self, prompts: sent.append(prompts))
    manager = object.__new__(SeededAgentLoopManagerV1)
    manager._seeds = PromptSeeds(42)
    prompts = tu.get_tensordict({"index": np.array([8, 9, 8], dtype=object)}, {"global_steps": 3})
    manager.generate_sequences(prompts)
    expected = PromptSeeds(42).of(3, False, [8, 9, 8])
    assert sent[0][PROMPT_SEED].tolist() == expected
    assert [int(chunk[PROMPT_SEED][0]) for chunk in sent[0].chunk(3)] == expected


def test_the_order_of_arrival_does_not_change_a_seeded_response(checkpoint: Path) -> None:
    requests = [([10 + index % 3, 11], 100 + index) for index in range(9)]

    async def responses(order: list[int], max_num_seqs: int) -> dict[int, list[int]]:
        server = make_server(checkpoint, max_num_seqs=max_num_seqs)
        outputs = await asyncio.gather(*(ask(server, requests[i][0], seed=requests[i][1]) for i in order))
        return {i: output.token_ids for i, output in zip(order, outputs, strict=True)}

    orders = [list(range(9)), random.Random(0).sample(range(9), 9)]
    first, second = (asyncio.run(responses(order, size)) for order, size in zip(orders, (256, 4), strict=True))
    assert first == second
    assert len({tuple(tokens) for tokens in first.values()}) == 9


def test_a_later_turn_does_not_repeat_the_random_numbers_of_the_first(checkpoint: Path) -> None:
    """An agent loop sends the same seed for every turn of a session."""
    server = make_server(checkpoint)
    first = asyncio.run(ask(server, [10, 11], seed=7)).token_ids
    assert asyncio.run(ask(server, [10, 11], seed=7)).token_ids == first
    # The model is random and nearly uniform, so equal random numbers would give nearly equal tokens.
    later = asyncio.run(ask(server, [10, 11, 12], seed=7)).token_ids
    assert sum(a == b for a, b in zip(first, later, strict=True)) < len(first) // 2


def train(folder: Path, script: str) -> list[list[tuple[str, str, float]]]:
    """Five float32 steps; the (prompt, response, reward) of every sequence of each step, sorted."""
    environment = {
        "WORK_DIR": str(folder),
        "TOTAL_STEPS": "5",
        "TRAIN_BATCH_SIZE": "4",
        # One optimizer step a training step: the modes balance differently, and would fill mini-batches differently.
        "PPO_MINI_BATCH_SIZE": "4",
        "MAX_TOKEN_LEN": "2048",
    }
    command = ["bash", f"examples/{script}", f"trainer.rollout_data_dir={folder}/rollouts"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = []
    for step in range(1, 6):
        lines = (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        sequences = [json.loads(line) for line in lines]
        steps.append(sorted((one["input"], one["output"], one["score"]) for one in sequences))
    return steps


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_one_seed_samples_the_same_tokens_in_rmpad_and_packed_mode_for_five_steps(tmp_path: Path) -> None:
    rmpad = train(tmp_path / "rmpad", "run_qwen3_rmpad.sh")
    packed = train(tmp_path / "packed", "run_qwen3_pg.sh")
    assert [len(step) for step in rmpad] == [32] * 5
    for number, (ours, stock) in enumerate(zip(packed, rmpad, strict=True), start=1):
        assert ours == stock, f"step {number}"
    assert len({response for _, response, _ in rmpad[0]}) > 4, "greedy or constant responses would prove nothing"
