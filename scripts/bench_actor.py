"""Time phases of verl's FSDP engine: stock against packed, in one process group.

    python scripts/bench_actor.py --model tiny --cases 512,64,8,4 --csv outputs/bench_actor.csv
    torchrun --nproc-per-node 1 scripts/bench_actor.py --model qwen3-4b --cases 4096,1024,4,1 8192,1024,8,1

Engines have random weights, and every path gets the same batch. A case is P,R,n,groups: prompt tokens, response tokens,
responses per prompt, prompts per rank. R may be ``ln:MEAN`` (log-normal), n ``4-16`` (uniform), P ``512+4x1024``: 512
text tokens and four images of 1,024. ``agent:P,REPLY,TOOL,TURNS,n,groups`` are sessions with a sample per turn,
``tree:P,STEP,BRANCHING,DEPTH,groups`` search trees with a sample per leaf.

Our paths run first, since verl patches model classes for the whole process. Speed-up is over rmpad of the same strategy
in the same run. The bound is the ratio of FLOPs, vision encoder included; stock verl computes the head on every token,
ours on response tokens. Memory is the peak of forward and backward; ``--optimizer SGD`` has no optimizer state.
``--profile`` also prints GPU time by kernel.

``distill`` is an update with ``forward_kl_topk`` of a random teacher's ``--topk`` tokens, ``sft`` one of the responses.
On one rank, running out of GPU memory is a result.
"""

import argparse
import gc
import logging
import math
import statistics
import sys
import tempfile
import time
from collections import namedtuple
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from benchmarks.actor_cases import PHASES, AnyCase, Case, Work, batch_of_phase, parse_case, samples_of_ranks
from benchmarks.actor_engines import EnginePath, add_engine_arguments, build_engine, join_process_group, shared_model
from benchmarks.batches import make_batch
from benchmarks.common import environment, free_memory, pinned_copies, print_table, with_ratios, write_csv
from rich.console import Console
from tensordict import TensorDict
from torch import _dynamo
from torch._dynamo.utils import counters
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_torch_device
from verl.workers.config import DistillationConfig, DistillationLossConfig, FSDPActorConfig
from verl.workers.utils.losses import ppo_loss, sft_loss

from verl_pg_plugin.planning.cost import ModelFlops
from verl_pg_plugin.skeleton import text_skeleton

logger = logging.getLogger(__name__)
SECONDS = ("seconds_q1", "seconds_median", "seconds_q3")
ROW_METRICS = ("computed_tokens", "patches", "host_gib")
COLUMNS = """
model case path kernel phase fits seconds_median seconds_q1 seconds_q3 speedup flop_bound peak_gib host_gib level
memory_ratio total_tokens computed_tokens patches total_patches computed_tflops_per_s slowest_over_mean graphs_compiled
layers_compiled world_size device driver versions options commit
"""
SHOWN = """
case path kernel phase seconds_median seconds_q1 seconds_q3 speedup flop_bound peak_gib memory_ratio level host_gib
computed_tflops_per_s slowest_over_mean patches
"""


class Row(namedtuple("Row", COLUMNS)):
    """One measurement: seconds of the slowest rank, memory of the largest; NaN if it did not fit.

    ``slowest_over_mean`` compares FLOPs of ranks, since FSDP makes their times equal. ``graphs_compiled`` counts the
    path's graphs so far; ``layers_compiled`` is the outcome of ``prefix_grouper.compile_layers``.
    """


def run_phase(engine: Any, phase: str, batch: TensorDict, loss: Any, entropy: bool) -> dict[str, Any]:
    """Run a phase once; return this rank's seconds, peak GiB, last micro-batch's activation level and ``ROW_METRICS``.

    An update's peak excludes the optimizer step, which allocates the same on every path.
    """
    data = tu.index_select_tensor_dict(batch, list(range(len(batch))))
    tu.assign_non_tensor(data, calculate_entropy=phase == "old_log_prob" or (phase == "update_actor" and entropy))
    update = phase not in ("old_log_prob", "ref")
    on_gpu = get_device_name() == "cuda"
    with engine.train_mode() if update else engine.eval_mode():
        gc.collect()  # else a collection may run in the timed part, for over half a second with compiled layers
        get_torch_device().synchronize()
        dist.barrier()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        if update:
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, loss, forward_only=False)
            peak = torch.cuda.max_memory_allocated() if on_gpu else 0
            if not math.isfinite(norm := engine.optimizer_step()):
                raise RuntimeError(f"the gradient norm is {norm}, so the timing is meaningless")
        else:
            output = engine.infer_batch(data)
            peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        get_torch_device().synchronize()
        seconds = time.perf_counter() - start
    ours = hasattr(engine, "last_plan")
    unknown = math.nan if ours and phase == "sft" else 0.0  # ours has no metrics in SFT
    metrics = {name: output["metrics"].get(f"prefix_grouper/{name}", [unknown])[0] for name in ROW_METRICS}
    level = engine.last_plan.micro_batches[-1].level.value if update and ours else ""
    return {"seconds": seconds, "peak_gib": peak / 2**30, "level": level, **metrics}


def measure(engine: Any, phase: str, batch: TensorDict, loss: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return median and quartiles over repeats, after warm-up; NaN if one GPU runs out of memory."""
    try:
        runs = [run_phase(engine, phase, batch, loss, args.entropy) for _ in range(args.warmup + args.repeats)]
    except torch.OutOfMemoryError:
        if dist.get_world_size() > 1:  # the other ranks may wait in a collective
            raise
        unknown: dict[str, Any] = dict.fromkeys((*SECONDS, "peak_gib", *ROW_METRICS), math.nan)
        return {"fits": False, **unknown, "level": "", "graphs_compiled": counters["stats"]["unique_graphs"]}
    own = [(run["seconds"], run["peak_gib"]) for run in runs[args.warmup :]]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    slowest, peaks = np.max(ranks, axis=0).T  # over ranks, in each run
    return {
        "fits": True,
        **dict(zip(SECONDS, np.percentile(slowest, [25, 50, 75]).tolist(), strict=True)),
        "peak_gib": float(peaks.max()),
        "level": runs[-1]["level"],
        **{name: runs[-1][name] for name in ROW_METRICS},
        "graphs_compiled": counters["stats"]["unique_graphs"],
    }


def loss_of_phase(phase: str, path: EnginePath, args: argparse.Namespace) -> Any:
    """Return verl's loss of a phase."""
    if phase == "sft":
        return partial(sft_loss, config=None)
    coefficient = 0.01 if args.entropy else 0.0
    actor = FSDPActorConfig(
        strategy=path.strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=coefficient
    )
    if phase != "distill":
        return partial(ppo_loss, config=actor)
    loss = DistillationLossConfig(
        loss_mode="forward_kl_topk", topk=args.topk, use_policy_gradient=False, use_task_rewards=False
    )
    return partial(distillation_ppo_loss, config=actor, distillation_config=DistillationConfig(distillation_loss=loss))


def profile_phase(title: str, engine: Any, phase: str, batch: TensorDict, loss: Any, args: argparse.Namespace) -> None:
    """Run a phase under torch's profiler; rank 0 prints its GPU's time by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run_phase(engine, phase, batch, loss, args.entropy)
    if dist.get_rank() == 0:
        kernels = profiler.key_averages().table("self_cuda_time_total", row_limit=40, max_name_column_width=90)
        Console(width=200).print(title, kernels, sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.add_argument("--max-token-len", type=int, default=20480, help="budget of a micro-batch, per rank")
    parser.add_argument("--entropy", action="store_true", help="update with an entropy bonus")
    parser.add_argument("--ulysses", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--cases", nargs="+", type=parse_case, default=[Case(512, "64", "8", 4)])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES[:3]))
    parser.add_argument("--topk", type=int, default=64, help="tokens of the teacher in distill")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="also print the longest kernels")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    if args.profile and not torch.cuda.is_available():
        parser.error("--profile needs a GPU")
    logging.basicConfig(level=logging.WARNING)

    join_process_group()
    with tempfile.TemporaryDirectory(prefix="bench_actor_") as folder:
        rows = run(args, shared_model(args, folder))
    if dist.get_rank() == 0:
        if args.csv:
            write_csv(rows, args.csv)
        print_table(sorted(rows, key=lambda row: (row.case, row.phase, not row.path.startswith("rmpad"))), SHOWN)
    if torch.cuda.is_available():
        rates = [""] * dist.get_world_size()
        dist.barrier()  # ranks copy at the same time
        dist.all_gather_object(rates, pinned_copies())
        if dist.get_rank() == 0:
            Console().print(*rates, sep="\n")
    dist.destroy_process_group()
    return 0


def run(args: argparse.Namespace, model_path: str) -> list[Row]:
    config = transformers.AutoConfig.from_pretrained(model_path)
    flops = ModelFlops.of(text_skeleton(config))
    options = f"dtype={args.dtype} optimizer={args.optimizer} entropy={args.entropy} topk={args.topk}"
    options += f" lora_rank={args.lora_rank}" if args.lora_rank else ""
    options += f" ulysses={args.ulysses}" if args.ulysses > 1 else ""
    options += f" max_token_len={args.max_token_len} warmup={args.warmup} repeats={args.repeats}"
    about = {"model": args.model, "world_size": dist.get_world_size(), "options": options, **environment()}
    rows = []
    for path in sorted(args.paths, key=lambda path: path.stock):
        _dynamo.reset()  # else a path would reuse the previous path's graphs and not count them
        counters.clear()
        # FSDP1 does not free an engine's weights.
        held = torch.cuda.memory_allocated() / 2**30 if get_device_name() == "cuda" else 0.0
        engine = build_engine(model_path, args, path)
        for case in args.cases:
            batch, work, total_patches = batch_and_work(case, path, args, config, flops)
            for phase in args.phases:
                loss = loss_of_phase(phase, path, args)
                data = batch_of_phase(batch, phase, args.topk, config.get_text_config().vocab_size)
                numbers = measure(engine, phase, data, loss, args)
                numbers["peak_gib"] -= held
                if path.stock:
                    numbers |= {"computed_tokens": work.total_tokens, "patches": total_patches}
                # An interrupted run leaves its measurements in the log.
                logger.warning("%s %s %s: %s", path, case, phase, numbers)
                done = work.flops(phase, packed=not path.stock)
                rows.append(
                    Row(
                        case=str(case),
                        path=str(path),
                        kernel="stock" if path.stock else engine.kernel.name,
                        layers_compiled=not path.stock and engine.compiles,
                        phase=phase,
                        speedup=math.nan,
                        flop_bound=sum(work.flops(phase, packed=False)) / sum(done),
                        memory_ratio=math.nan,
                        total_tokens=work.total_tokens,
                        total_patches=total_patches,
                        computed_tflops_per_s=statistics.mean(done) / numbers["seconds_median"] / args.ulysses / 1e12,
                        slowest_over_mean=max(done) / statistics.mean(done),
                        **numbers,
                        **about,
                    )
                )
                if not numbers["fits"]:  # FSDP stopped within a layer
                    del engine
                    free_memory()
                    engine = build_engine(model_path, args, path)
                elif args.profile:
                    profile_phase(f"{path} {case} {phase}", engine, phase, data, loss, args)
        del engine
        free_memory()
    return with_ratios(rows, "path")


def batch_and_work(
    case: AnyCase, path: EnginePath, args: argparse.Namespace, config: Any, flops: ModelFlops
) -> tuple[TensorDict, Work, int]:
    """Return this rank's batch of a case, the FLOPs of all ranks, and the patches of all sequences."""
    num_parts, rank = dist.get_world_size() // args.ulysses, dist.get_rank() // args.ulysses
    whole = case.rows(_num_plain_tokens(config), num_parts)
    if case.images:
        whole = replace(whole, samples=case.images.put_into(whole.samples, config))
    parts = samples_of_ranks(whole, path.stock, flops, num_parts)
    ranks = [[whole.samples[row] for row in part] for part in parts]
    budget, in_micro_batch = path.budget or args.max_token_len, case.largest_group
    if path.mode == "padded":  # as many sequences as fit the budget
        longest = max(len(sample.prompt) + len(sample.response) for sample in whole.samples)
        in_micro_batch = max(budget // longest, 1)
    batch = make_batch(
        ranks[rank],
        max_token_len_per_gpu=budget,
        use_remove_padding=path.unpadded,
        use_dynamic_bsz=path.unpadded,
        use_fused_kernels=path.has("fused"),
        micro_batch_size_per_gpu=in_micro_batch,
        global_batch_size=len(whole.samples),
    )
    groups = [whole.group[part].tolist() for part in parts]
    if not case.images:
        return batch, Work.of(ranks, flops), 0
    patches = len(whole.samples) * case.images.number * case.images.patches(config)
    work = Work.of(ranks, flops, case.images.flops(groups, config, flops))
    return case.images.add_to(batch, groups[rank], config), work, patches


def _num_plain_tokens(config: Any) -> int:
    """Return the number of token ids below the first image or video mark."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return min(config.get_text_config().vocab_size, *(getattr(config, name, 1 << 31) for name in names))


if __name__ == "__main__":
    sys.exit(main())
