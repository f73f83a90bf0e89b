"""Time generation by vLLM, stock and with shared decode, on random weights.

    python scripts/bench_rollout.py --csv outputs/bench_rollout.csv
    python scripts/bench_rollout.py --model-shape qwen3-8b --cases 8192,1024,8,8 agent:2048,256,128,10,8,4

A case is P,R,n,prompts: prompt and response tokens, responses per prompt, prompts in one batch; or
agent:P,IN,OUT,TURNS,n,prompts: sessions that generate OUT tokens and then get IN more, TURNS times. Modes run one after
the other on the same GPU, each in a process, with CUDA graphs as in verl's rollouts. Every case warms up once, then
runs ``--repeats`` times. Prefill is the time to one token for each request.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.common import environment, print_table, write_csv
from benchmarks.shapes import SHAPES, config_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl_pg_plugin.rollout import SHARED_DECODE, register_with_vllm

MODES = ("stock", "shared")
COLUMNS = """
case mode shape prefill_s total_s total_min_s total_max_s tokens_per_s speedup device driver versions commit
"""


class Row(namedtuple("Row", COLUMNS)):
    """One mode in one case; seconds are medians."""


class Case(NamedTuple):
    """Lengths of a case; without turns, ``given`` is 0 and ``turns`` 1."""

    prompt: int
    given: int
    out: int
    turns: int
    n: int
    prompts: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        kind, _, lengths = text.rpartition(":")
        first, second, *others = map(int, lengths.split(","))
        return cls(first, second, *others) if kind else cls(first, 0, second, 1, *others)

    @property
    def num_generated(self) -> int:
        return self.out * self.turns * self.n * self.prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--cases", nargs="+", default=["8192,1024,8,4", "300,1024,8,8"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    parser.add_argument("--csv", type=Path, default=Path("outputs/bench_rollout.csv"))
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        generate(args)
        return
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for mode in args.modes:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in filter(lambda line: line.startswith('{"case"'), child.stdout):
                sys.stdout.write(f"{mode} {line}")  # for interrupted runs
                sys.stdout.flush()
                result = json.loads(line)
                seconds.setdefault((result["case"], mode), []).append((result["prefill"], result["total"]))
        if child.returncode:
            raise SystemExit(f"{mode} ended with exit code {child.returncode}")
    where, rows = environment(), []
    for (case, mode), times in seconds.items():
        prefill, total = (statistics.median(column) for column in zip(*times, strict=True))
        first = statistics.median(total for _, total in seconds[case, args.modes[0]])
        totals = [total for _, total in times]
        rows.append(
            Row(
                *(case, mode, args.model_shape),
                *(round(value, 3) for value in (prefill, total, min(totals), max(totals))),
                *(round(Case.parse(case).num_generated / total), round(first / total, 3)),
                **where,
            )
        )
    print_table(rows, "case mode prefill_s total_s tokens_per_s speedup")
    write_csv(rows, args.csv)


def generate(args: argparse.Namespace) -> None:
    """Run every case in this process; write a line of JSON for each repetition."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    register_with_vllm()
    cases = {text: Case.parse(text) for text in args.cases}
    max_model_len = 16 + max(case.prompt + case.turns * (case.given + case.out) for case in cases.values())
    requests = [case.n * case.prompts for case in cases.values()]
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args.model_shape)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.max_position_embeddings = max_model_len
        config.save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=max_model_len,
            max_num_seqs=max(requests),
            gpu_memory_utilization=args.gpu_memory_utilization,
            enable_prefix_caching=True,
            seed=0,
            compilation_config={"cudagraph_capture_sizes": sorted({1, 2, 4, 8, 16, 32, 64, *requests})},
            additional_config={SHARED_DECODE: args.child == "shared"},
        )
    random = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(100, config.vocab_size - 100, (count,), generator=random).tolist()

    def run(requests: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        sampling = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in requests], sampling, use_tqdm=False)
        return time.perf_counter() - begin, [list(output.outputs[0].token_ids) for output in outputs]

    for text, case in cases.items():
        for repetition in range(args.repeats + 1):
            prefill = total = 0.0
            sessions = [ids for ids in map(tokens, [case.prompt] * case.prompts) for _ in range(case.n)]
            if not text.startswith("agent:"):
                llm.reset_prefix_cache()
                prefill, _ = run(sessions, 1)
            llm.reset_prefix_cache()
            for _ in range(case.turns):
                seconds, replies = run(sessions, case.out)
                total += seconds
                sessions = [ids + reply + tokens(case.given) for ids, reply in zip(sessions, replies, strict=True)]
            if repetition:
                result: dict[str, Any] = {"case": text, "prefill": prefill, "total": total}
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
