"""Time whole training steps of verl's trainer, phase by phase: each mode through its script in ``examples/``.

    python scripts/bench_step.py --cases 64,8,4,4 --steps 3                         # a rehearsal on a CPU
    python scripts/bench_step.py --model-shape qwen3-4b --cases 4096,1024,4,8 8192,1024,8,4 \
        --modes rmpad packed --steps 3 --timeout 280 --output-dir outputs/step_4b
    python scripts/bench_step.py --model-shape qwen3-4b --cuda-graphs --steps 4 --cases 8192,1024,8,8 300,4096,8,8 \
        --modes packed:old_log_prob=always packed                                    # the forward for old log-probs
    python scripts/bench_step.py --cases 600,50,8,4,10 ...                           # agents of ten turns
    python scripts/bench_step.py ... -- actor_rollout_ref.actor.entropy_coeff=0.01   # verl overrides for every run

Weights are random, prompts are P random words, and responses have exactly R tokens (``ignore_eos``). Rollout is vLLM on
GPUs and the plugin's own on a CPU. GRPO with a reference policy, AdamW, FSDP2, gradient checkpointing (on GPUs), one
optimizer step per training step. Every mode runs in its own process tree with the same token budgets.

``--output-dir`` gets ``bench_step.csv``, rewritten after every run, each run's log and metrics file, checkpoints and
prompts. A run that fails or exceeds ``--timeout`` keeps its finished steps; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import environment, print_table, with_ratios, write_csv
from benchmarks.shapes import SHAPES
from benchmarks.step_inputs import make_checkpoint, make_prompts, word_tokenizer
from benchmarks.step_metrics import StepRow, rows_of_run
from benchmarks.step_runs import FEW_PROCESSES, REPOSITORY, ScriptRun, train

EXAMPLES = {
    "rmpad": "run_qwen3_rmpad.sh",
    "packed": "run_qwen3_pg.sh",
    "prefix_grouper": "run_qwen3_prefix_grouper.sh",
}
AGENT_EXAMPLE = "run_qwen3_agent_pg.sh"
TOKENS_BETWEEN_TURNS = 16
SHOWN = "case mode phase seconds_median seconds_min seconds_max speedup peak_gib tokens_per_s_per_gpu dedup_ratio"


@dataclass(frozen=True)
class StepCase:
    """Lengths of a step's prompts and responses."""

    prompt: int  # tokens
    response: int  # tokens; of a turn, if there are turns
    n: int  # responses per prompt
    prompts: int  # per training step, on all GPUs
    turns: int = 0  # samples of a session

    @classmethod
    def parse(cls, text: str) -> StepCase:
        numbers = text.split(",")
        if len(numbers) not in (4, 5) or not all(number.isdigit() and int(number) for number in numbers):
            raise argparse.ArgumentTypeError(f"{text}: a case is P,R,n,prompts or P,R,n,prompts,turns: 4096,1024,4,8")
        return cls(*map(int, numbers))

    def __str__(self) -> str:
        return ",".join(map(str, astuple(self)[: 5 if self.turns else 4]))

    @property
    def longest_prompt(self) -> int:
        """Tokens of the last turn's prompt: a turn adds its response and the checker's reply with chat marks."""
        return self.prompt + max(self.turns - 1, 0) * (self.response + TOKENS_BETWEEN_TURNS)


def mode(text: str) -> str:
    """A mode, with options of the plugin after a colon: packed:KEY=VALUE,..."""
    name, _, options = text.partition(":")
    if name not in EXAMPLES or (name == "rmpad" and options):
        raise argparse.ArgumentTypeError(f"{text}: choose {', '.join(EXAMPLES)}; only ours take :KEY=VALUE,...")
    return text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, help="use this many layers of the model")
    case = {"type": StepCase.parse, "default": [StepCase(64, 8, 4, 4)], "metavar": "P,R,n,prompts[,turns]"}
    parser.add_argument("--cases", nargs="+", **case)
    parser.add_argument("--modes", nargs="+", type=mode, default=["rmpad", "packed"], help=mode.__doc__)
    parser.add_argument("--steps", type=int, default=3, help="training steps of a run; the first warms up")
    parser.add_argument("--ngpus", type=int, default=1)
    parser.add_argument("--max-token-len", type=int, default=20480, help="token budget of a micro-batch, per GPU")
    parser.add_argument("--ref-max-token-len", type=int, help="the same for the reference policy; default: equal")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3, help="share of the GPU that vLLM takes")
    parser.add_argument("--cuda-graphs", action="store_true", help="vLLM captures CUDA graphs: start-up is longer")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run, start-up included")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/bench_step"))
    parser.add_argument("overrides", nargs="*", help="verl overrides for every run, after --")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step is not measured")
    args.output_dir = args.output_dir.absolute()
    return args


def prepare(args: argparse.Namespace, device: str) -> tuple[dict[str, str], Path, dict[StepCase, Path]]:
    """Return the environment, the checkpoint and each case's prompts; write missing files.

    A child process uses the GPU, so its memory is free when the first run starts.
    """
    model_path = args.output_dir / f"model-{args.model_shape}{f'-{args.layers}-layers' if args.layers else ''}"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        about = pool.submit(environment).result()
        if not model_path.is_dir():
            dtype = torch.bfloat16 if device == "gpu" else torch.float32
            pool.submit(make_checkpoint, model_path, args.model_shape, dtype, args.layers).result()
    tokenizer = word_tokenizer(SHAPES[args.model_shape]["vocab_size"])
    prompts = {}
    for case in args.cases:
        path = args.output_dir / f"prompts-{args.model_shape}-{case.prompt}-{case.prompts * args.steps}.parquet"
        if not path.is_file():
            make_prompts(path, tokenizer, length=case.prompt, num_prompts=case.prompts * args.steps)
        prompts[case] = path
    return about, model_path, prompts


def run_of(
    case: StepCase, mode: str, args: argparse.Namespace, device: str, model_path: Path, prompts: Path
) -> ScriptRun:
    """Return the run of the mode's example script; the user's overrides come last."""
    name = re.sub(r"[^\w.]+", "-", f"{case}-{mode}")
    variables = {
        "DEVICE": device,
        "PYTHON": sys.executable,
        "WORK_DIR": args.output_dir / "runs" / name,
        "MODEL_PATH": model_path,
        "TRAIN_FILES": prompts,
        "VAL_FILES": prompts,
        "NGPUS_PER_NODE": args.ngpus,
        "ROLLOUT_N": case.n,
        "TRAIN_BATCH_SIZE": case.prompts,
        "PPO_MINI_BATCH_SIZE": case.prompts,
        "MAX_PROMPT_LENGTH": case.longest_prompt,
        "MAX_RESPONSE_LENGTH": case.response,
        "MAX_TOKEN_LEN": args.max_token_len,
        "REF_MAX_TOKEN_LEN": args.ref_max_token_len or args.max_token_len,
        "GPU_MEMORY_UTILIZATION": args.gpu_memory_utilization,
        "TOTAL_STEPS": args.steps,
        "TOTAL_EPOCHS": 1,
        "MAX_TURNS": case.turns,
        "USE_PREFIX_GROUPER": mode != "rmpad",
    }
    example, _, options = mode.partition(":")
    overrides = [
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"actor_rollout_ref.rollout.enforce_eager={not args.cuda_graphs}",
        f"actor_rollout_ref.rollout.max_model_len={case.longest_prompt + case.response}",
        *FEW_PROCESSES,
        f"reward.custom_reward_function.path={REPOSITORY / 'scripts' / 'benchmarks' / 'step_reward.py'}",
        *(f"prefix_grouper.{option}" for option in options.split(",") if option),
        *args.overrides,
    ]
    environ = {key: str(value) for key, value in variables.items()}
    script = AGENT_EXAMPLE if case.turns else EXAMPLES[example]
    return ScriptRun.of_example(script, overrides, environ, args.output_dir, name)


def main() -> int:
    args = parse_args()
    device = "gpu" if torch.cuda.is_available() else "cpu"
    about, model_path, prompts = prepare(args, device)
    rows: list[StepRow] = []
    failed = False
    for case, name in product(args.cases, args.modes):
        run = run_of(case, name, args, device, model_path, prompts[case])
        run.metrics.unlink(missing_ok=True)
        outcome, steps = train(run, args.steps, args.timeout)
        failed |= outcome != "ok"
        description: dict[str, Any] = {
            "model": model_path.name.removeprefix("model-"),
            "case": str(case),
            "mode": name,
            "outcome": outcome,
            "num_gpus": args.ngpus,
            "max_token_len": args.max_token_len,
            "rollout": "vllm" if device == "gpu" else "hf",
            "cuda_graphs": args.cuda_graphs,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "overrides": " ".join(args.overrides),
        }
        rows = with_ratios([*rows, *rows_of_run(steps, {**description, **about})], "mode")
        if rows:
            write_csv(rows, args.output_dir / "bench_step.csv")
    print_table(rows, SHOWN)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
