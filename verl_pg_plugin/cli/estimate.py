"""``estimate``: what sharing prompts would gain on given data, by token budget, before anything is run."""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_pg_plugin.attention.kernels import gpus
from verl_pg_plugin.cli import CommandError, in_columns
from verl_pg_plugin.planning.activation_level import DEVICE_RESERVE, Level, Levels

if TYPE_CHECKING:
    from verl_pg_plugin.layout import Sequences
    from verl_pg_plugin.planning.forecast import Forecast

VERLS_BUDGET = 16384
ACCURACY = (
    "fitted to 8 cases of Qwen3-0.6B to 8B on an H200, median error 4%; on 4 others 7%; at most 26%, above 1B 15%"
)
DESCRIPTION = """\
What packed mode would gain over stock verl (rmpad) on one rank's mini-batch, by token budget. The mini-batch is planned
and laid out as in a training and priced in FLOPs, with a fixed price for each micro-batch; nothing is run on a model.
Lengths come from --prompt and --response, from --data and --response, or from --rollouts.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "estimate",
        help="what sharing would gain on your data: dedup ratio, FLOPs, predicted speed-up by token budget",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of a checkpoint, or a hub id")
    add("--prompt", type=_positive, help="tokens of each prompt, which share nothing with each other")
    add("--response", type=_positive, help="tokens of each response (their mean)")
    add("--n", type=_positive, default=8, help="responses to a prompt (8)")
    add("--groups", type=_positive, default=8, help="prompts of a mini-batch on one rank; of rollouts the first (8)")
    add("--data", type=Path, help="parquet file of prompts as verl reads it; what they share with each other counts")
    add("--prompt-key", default="prompt", help="column of the messages (prompt)")
    add("--rollouts", type=Path, help="folder that trainer.rollout_data_dir named; the last step is read")
    add("--budget", type=_positive, nargs="+", help="tokens of a micro-batch; several by default")
    add("--gpus", type=_positive, default=8, help="that share the weights, gradients and AdamW's state (8)")
    add("--gpu-gib", type=_not_negative, help="memory of one GPU (this machine's; 80 without one)")
    levels = ("auto", *(level.value for level in Level))
    add("--activations", choices=levels, default="auto", help="++prefix_grouper.activations")
    add("--host-gib", type=_not_negative, default=100.0, help="host memory for each GPU, for levels on the host (100)")
    add("--kernel", choices=("flash_attn_2", "flash_attn_3", "flash_attn_4"), default="flash_attn_2")
    add("--no-ref", action="store_true", help="the step has no reference policy")
    add("--gen-seconds", type=_not_negative, default=0.0, help="of a step's rollout, for the speed-up of the step (0)")
    add("--tflops", type=_positive, default=380, help="that a GPU reaches, for the step (380: an H200)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the answer and its table."""
    if sum(source is not None for source in (args.prompt, args.data, args.rollouts)) != 1:
        raise CommandError("give lengths by one of --prompt, --data and --rollouts; --help says more")
    if args.rollouts is None and args.response is None:
        raise CommandError("--response is missing: how long responses are cannot be told from prompts")

    from transformers import AutoConfig

    from verl_pg_plugin.architectures import architecture_issues, text_skeleton
    from verl_pg_plugin.config.compile import compiled_by_auto
    from verl_pg_plugin.planning.cost import ModelFlops
    from verl_pg_plugin.planning.forecast import forecast
    from verl_pg_plugin.planning.memory import TokenBytes, WeightBytes

    config = load(AutoConfig, args.model)
    for issue in architecture_issues(config, trust_remote_code=False):
        if not issue.fix:
            raise CommandError(f"--model {args.model}: packed mode does not run it: {issue.why}")
        sys.stdout.write(f"a run needs {issue.fix}: {issue.why}\n")
    module = text_skeleton(config)
    try:
        flops = ModelFlops.of(module)
        batch, lengths = read_batch(args)
    except ValueError as error:
        raise CommandError(str(error)) from error
    longest = int(batch.lengths.max())
    if args.budget and min(args.budget) < longest:
        raise CommandError(f"--budget {min(args.budget)} does not hold the longest sequence of {longest} tokens")
    compiled, why = compiled_by_auto(config.model_type, "cuda")
    weights = WeightBytes.of(module, args.gpus)
    gib = _memory_of_a_gpu() if args.gpu_gib is None else args.gpu_gib
    sizes = TokenBytes.of(config.get_text_config(), compiled=compiled)
    if sizes is None:
        raise CommandError(f"--model {args.model}: its config names no hidden_size or no num_attention_heads")
    room = weights.room(2**30 * gib, 2**30 * args.host_gib)
    levels = Levels.of_settings(args.activations, True, sizes=sizes, room=room)

    rows: list[dict[str, Any]] = []
    usual = -(-longest // 1024) * 1024, VERLS_BUDGET, 32768, 65536, 131072
    for budget in sorted(args.budget or {budget for budget in usual if budget >= longest}):
        found = forecast(batch, flops, levels, budget, compile_layers=compiled, kernel=args.kernel)
        rows.append(figures(found, found.peak_gib(weights), gib, args))
        if not args.budget and found.micro_batches == 1 and budget >= VERLS_BUDGET:
            break  # a larger one changes nothing

    assumed = (
        f"assumed: {args.gpus} GPUs of {gib:g} GiB, {args.host_gib:g} GiB of the host for each; weights, "
        f"gradients and AdamW take {weights.fixed / 2**30:.0f} GiB of a GPU and {DEVICE_RESERVE:.0%} stays free; "
        f"fsdp2 (fsdp gains as much); {args.kernel}; layers {'compiled' if compiled else 'not compiled'} ({why}); "
        "stock verl with flash-attn 2 and the same budget"
    )
    lines = [*answer(rows, args, gib), lengths, "", *table(rows), "", assumed, ACCURACY]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def figures(found: Forecast, peak: float, gib: float, args: argparse.Namespace) -> dict[str, Any]:
    """Of a budget: its forecast, whether the update's peak in GiB fits, and seconds of a step."""
    log_prob, update = (price / (args.tflops * 1e12) for price in found.alone)
    log_prob *= 1 if args.no_ref else 2
    stock = args.gen_seconds + log_prob + update
    shared = args.gen_seconds + log_prob / found.old_log_prob + update / found.update
    fits = peak <= (1 - DEVICE_RESERVE) * gib and found.host_gib <= args.host_gib
    of_step = {"step_seconds_stock": stock, "step_seconds_shared": shared, "step": stock / shared}
    about = {"level": found.level.value, "dedup_ratio": found.dedup_ratio, "peak_gib": peak, "fits": fits}
    return {**asdict(found), **about, **of_step}


def answer(rows: list[dict[str, Any]], args: argparse.Namespace, gib: float) -> list[str]:
    """What sharing removes, and the fastest budget that fits with what it gains and takes."""
    fitting = [row for row in rows if row["fits"]] or rows
    fastest = min(row["step_seconds_shared"] for row in fitting) - args.gen_seconds
    # Of budgets as fast as each other the smallest, which takes least memory.
    best = next(row for row in fitting if row["step_seconds_shared"] - args.gen_seconds <= 1.01 * fastest)
    tokens, ratio = best["logical_tokens"], best["dedup_ratio"]
    removed = f"sharing removes {1 - 1 / ratio:.0%} of {tokens:,} tokens: {ratio:.2f}x fewer"
    if not best["fits"]:
        least = f"the smallest takes {min(row['peak_gib'] for row in rows):.1f} GiB"
        return [removed, f"no budget fits into this memory, {least}: more --gpus, or a Ulysses group"]
    share, update = best["sharing_alone"], best["update"]
    step = "step" if args.gen_seconds else "step without generation"
    gain = f"{step} {best['step']:.2f}x as fast; update {update:.2f}x, of which sharing alone gives {share:.2f}x and "
    gain += f"compiled layers {update / share:.2f}x"
    memory = f"{best['peak_gib']:.1f} of {gib:g} GiB of a GPU and {best['host_gib']:.1f} GiB of the host"
    actor = "actor_rollout_ref.actor."
    budget = f"{actor}use_dynamic_bsz=True {actor}ppo_max_token_len_per_gpu={best['budget']}"
    return [removed, gain, f"fastest budget that fits: {budget}, with {memory}"]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each budget, below their titles."""
    titles = ("budget", "micro-batches", "tokens", "dedup", "FLOP ratio", "old_log_prob", "sharing alone", "update")
    cells: list[tuple[str, ...]] = [(*titles, "step", "level", "GiB", "host GiB", "fits")]
    for row in rows:
        budget = f"{row['budget']}{' (verl)' if row['budget'] == VERLS_BUDGET else ''}"
        speeds = [row["dedup_ratio"], row["flop_ratio"], row["old_log_prob"], row["sharing_alone"], row["update"]]
        speedups = (f"{speed:.2f}x" for speed in (*speeds, row["step"]))
        memory = row["level"], f"{row['peak_gib']:.1f}", f"{row['host_gib']:.1f}", "yes" if row["fits"] else "no"
        cells.append((budget, str(row["micro_batches"]), f"{row['physical_tokens']:,}", *speedups, *memory))
    return in_columns(cells)


def load(auto_class: Any, name: str) -> Any:
    """A checkpoint's config or tokenizer, from a folder, the cache or the hub; no weight is read."""
    from httpx import HTTPError
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if not Path(name).is_dir() and not isinstance(try_to_load_from_cache(name, "config.json"), str):
            # One try: without a network transformers would try for half a minute.
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=5)
        return auto_class.from_pretrained(name, trust_remote_code=False)
    except HFValidationError as error:  # nothing on the hub has such a name: it is a path
        raise CommandError(f"--model {name}: no such folder; pass the folder of a checkpoint, or a hub id") from error
    except (OSError, ValueError, KeyError, HTTPError) as error:
        said = str(error).strip().splitlines()[0]
        download = "" if Path(name).is_dir() else f"hf download {name} --include '*.json' where there is a network, or "
        ways = f"{download}--model <folder of a checkpoint>"
        raise CommandError(f"--model {name} cannot be read by {auto_class.__name__}: {said}; {ways}") from error


def _memory_of_a_gpu() -> float:
    """GiB of this machine's first GPU, as nvidia-smi says; without one, of an H100."""
    memory = [gpu.rpartition(",")[2].split()[0] for gpu in gpus()]
    return float(memory[0]) / 1024 if memory and memory[0].isdecimal() else 80.0


# Lengths


def read_batch(args: argparse.Namespace) -> tuple[Sequences, str]:
    """The mini-batch, and what must be known about its lengths."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    from verl_pg_plugin.planning.forecast import batch_of_lengths, batch_of_prompts

    if args.prompt is not None:
        batch = batch_of_lengths([args.prompt] * args.groups, [[args.response] * args.n] * args.groups)
        groups = f"{args.groups} groups of {args.n} responses of {args.response} tokens to a prompt of {args.prompt}"
        return batch, f"{groups}; prompts share nothing with each other"
    tokenizer = load(AutoTokenizer, args.model)

    def ids(text: str) -> Any:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    if args.data is not None:
        if not args.data.is_file():
            raise CommandError(f"--data {args.data}: no such file")
        try:
            names = pq.read_schema(args.data).names
            if args.prompt_key not in names:
                raise CommandError(
                    f"--data {args.data} has no column {args.prompt_key}: --prompt-key <{' or '.join(names)}>"
                )
            column = pq.read_table(args.data, columns=[args.prompt_key]).column(0)
        except pa.ArrowException as error:
            raise CommandError(f"--data {args.data}: not a parquet file: {str(error).splitlines()[0]}") from error
        chats = column[: args.groups].to_pylist()
        if not all(isinstance(chat, list) for chat in chats):
            why = f"the column {args.prompt_key} holds no lists of messages with role and content, as verl reads them"
            raise CommandError(f"--data {args.data}: {why}; name another with --prompt-key")
        try:
            texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        except TemplateError as error:
            raise CommandError(f"--data {args.data}: the model's chat template refuses a prompt: {error}") from error
        prompts = [ids(text) for text in texts]
        batch = batch_of_prompts(prompts, [[args.response] * args.n] * len(prompts))
        counts = [len(prompt) for prompt in prompts]
        remark = f"{len(prompts)} prompts of {min(counts)} to {max(counts)} tokens, in the order of the file; {args.n} "
        return batch, remark + f"responses of {args.response} tokens each"
    file, found = _groups(args.rollouts)
    chosen = found[: args.groups]
    prompts = [ids(group[0]["input"]) for group in chosen]
    responses = [[max(len(ids(record["output"])), 1) for record in group] for group in chosen]
    remark = f"{len(chosen)} of {len(found)} groups of {file.name}, as text without special tokens, so lengths are "
    return batch_of_prompts(prompts, responses), remark + "some tokens short"


def _groups(folder: Path) -> tuple[Path, list[list[dict[str, Any]]]]:
    """verl's dump of the last step, lines with ``input`` and ``output`` by prompt.

    Sequences of a prompt share their ``uid`` but for ``_session_output``; V0's dump has none.
    """
    if not folder.is_dir():
        raise CommandError(f"--rollouts {folder}: no such folder")
    file = max(folder.glob("*.jsonl"), key=lambda file: (len(file.stem), file.stem), default=None)
    if file is None:
        raise CommandError(f"--rollouts {folder} has no .jsonl file; train with trainer.rollout_data_dir=<folder>")
    groups: dict[str, list[dict[str, Any]]] = {}
    # Lines end here alone, and not where Unicode knows of other ends.
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            prompt, _ = record["input"], record["output"]
        except (ValueError, TypeError, KeyError) as error:
            why = f"has no input and output as JSON ({error}); is the run still writing it?"
            raise CommandError(f"{file}, line {number}, {why}") from error
        groups.setdefault(str(record["uid"]).rsplit("_", 2)[0] if "uid" in record else prompt, []).append(record)
    if not groups:
        raise CommandError(f"{file} is empty; is the run still writing it?")
    return file, list(groups.values())


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def _not_negative(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text} is no number of at least 0")
