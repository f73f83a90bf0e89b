"""``estimate``: tokens and FLOPs of a mini-batch, total and computed, and the nearest measured update."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from verl_pg_plugin.cli import CommandError, count
from verl_pg_plugin.layout import IntArray, PrefixOrder, build_prefix_order
from verl_pg_plugin.planning.prefix_breaks import Turn, report, tokenize

MAX_SEQUENCES = 10**6  # arrays of sequences fit in memory
PADDING = re.compile(r"pad[0-9a-f]{32}_")  # ids of the sequences that verl adds to fill a batch
UNKNOWN = 2**31  # token ids from here on are in no vocabulary
MEASURED = {
    "Qwen3-4B, 4 prompts of 4096, response 1024, n 1": (1.00, 2.14, 1.40),
    "Qwen3-4B, 1 prompt of 300, response 4096, n 8": (1.06, 3.65, 2.42),
    "Qwen3-4B, 2 prompts of 2048, response 3072, n 8": (1.54, 8.54, 4.25),
    "Qwen3-8B, 1 prompt of 16384, response 4096, n 16": (4.00, 67.60, 16.14),
    "Qwen3-4B, 1 prompt of 8192, response 1024, n 8": (4.50, 8.85, 1.61),
    "Qwen3-4B, 1 prompt of 32768, response 1024, n 8": (6.60, 56.61, 7.20),
    "Qwen3-4B, 8 agents of 10 turns": (9.88, 8.50, 0.74),
}
"""Updates on one H200 (docs/data/updates.csv): dedup ratio, seconds of stock verl with rmpad, and of packed mode."""


def add_parser(subparsers: Any) -> None:
    about = "tokens and FLOPs of a mini-batch, total and computed, and the nearest measured update"
    parser = subparsers.add_parser("estimate", help=about, description=f"Count {about}. Nothing is run.")
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder or hub id; weights are not read")
    add("--prompt", type=count, help="tokens per prompt")
    add("--response", type=count, help="tokens per response (mean)")
    add("--n", type=count, default=8, help="responses per prompt (8)")
    add("--data", type=Path, help="instead of --prompt: parquet file of prompts as verl reads it")
    add("--prompt-key", default="prompt", help="column of the messages (prompt)")
    add("--rollouts", type=Path, help="instead of lengths: trainer.rollout_data_dir of a run; the last step is read")
    add("--groups", type=count, default=8, help="prompts read from --data or --rollouts (the first 8)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the counts and the measured update with the nearest dedup ratio."""
    if sum(source is not None for source in (args.prompt, args.data, args.rollouts)) != 1:
        raise CommandError("lengths must come from exactly one source. Fix: --prompt, --data or --rollouts")
    if args.rollouts is None and args.response is None:
        raise CommandError("--response is not set. Fix: --response <tokens>")
    from transformers import AutoConfig, AutoTokenizer

    from verl_pg_plugin.architectures import architecture_issues

    config = load(AutoConfig, args.model)
    if args.prompt:
        order, prompts = _with_responses(np.array([args.prompt]), np.array([0]), args)
    else:
        order, prompts = (read_data if args.data else read_rollouts)(args, load(AutoTokenizer, args.model))
    total, computed = int(order.num_tokens.sum()) + len(prompts), int(order.num_new.sum())
    nearest, (ratio, stock, packed) = min(MEASURED.items(), key=lambda row: abs(np.log(row[1][0] * computed / total)))
    for issue in architecture_issues(config, trust_remote_code=False):
        sys.stdout.write(f"packed mode refuses the model: {issue.why}. Fix: {issue.fix or 'another --model'}\n")
    sys.stdout.write(
        f"tokens: {total:,} in total, {computed:,} computed, dedup ratio {total / computed:.2f}\n"
        f"{count_flops(config, order, prompts)}\n"
        f"measured, not predicted: {nearest}: dedup ratio {ratio:.2f}, an update on one H200 takes {packed:.2f} s, and "
        f"{stock:.2f} s in stock verl with rmpad\n"
    )


def count_flops(config: Any, order: PrefixOrder, prompts: IntArray) -> str:
    """Return a line with the FLOPs of a forward over sequences with prompt lengths (B,), or why they are unknown."""
    from verl_pg_plugin.planning.cost import ModelFlops
    from verl_pg_plugin.skeleton import text_skeleton

    flops = ModelFlops.or_tokens(lambda: text_skeleton(config))
    if flops.unknown:
        return f"FLOPs of {config.model_type} {flops.unknown}"
    labels = order.num_tokens - np.maximum(order.num_shared, prompts - 1)
    total = float(flops.alone(order.num_tokens + 1).sum())
    computed = float(flops.segments(order.num_shared, order.num_new, labels).sum())
    return f"FLOPs of a forward: {total:.3g} in total, {computed:.3g} computed, FLOP ratio {total / computed:.2f}"


def load(auto_class: Any, name: str) -> Any:
    """Load a checkpoint's config or tokenizer from a folder, the cache or the hub."""
    try:
        return auto_class.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # from transformers, the hub client or a config class
        raise CommandError(f"--model={name}: {error}. Fix: --model <folder of a checkpoint>") from error


def read_data(args: argparse.Namespace, tokenizer: Any) -> tuple[PrefixOrder, IntArray]:
    """Read the first prompts of a parquet file with the model's chat template; responses have one length."""
    import pyarrow.parquet as pq

    try:
        chats = pq.read_table(args.data, columns=[args.prompt_key])[0][: args.groups].to_pylist()
        texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        order, lengths = _sorted([tokenize([(text, "")], tokenizer)[0] for text in texts])
    except Exception as error:  # from pyarrow or the checkpoint's chat template
        why = f"--data={args.data} --prompt-key={args.prompt_key}: {type(error).__name__}: {error}"
        raise CommandError(f"{why}. Fix: a parquet file, and its column of messages") from error
    sys.stdout.write(f"{len(lengths)} prompts of {lengths.min()} to {lengths.max()} tokens\n")
    return _with_responses(lengths, order.num_shared, args)


def read_rollouts(args: argparse.Namespace, tokenizer: Any) -> tuple[PrefixOrder, IntArray]:
    """Read the first groups of the last step that verl dumped, as text without special tokens."""
    file = max(args.rollouts.glob("*.jsonl"), key=lambda file: (len(file.stem), file.stem), default=args.rollouts)
    groups: dict[str, dict[str, list[tuple[str, str]]]] = {}
    try:
        for line in filter(None, file.read_text("utf-8", "replace").split("\n")):  # not splitlines: Unicode
            record = json.loads(line)
            if PADDING.match(str(record.get("uid"))):
                continue
            # Turns share their uid except its suffix ``_turn``, a prompt's sessions also ``_session``; V0 dumps no uid.
            session = str(record["uid"]).rsplit("_", 1)[0] if "uid" in record else line
            uid = session.rsplit("_", 1)[0] if "uid" in record else record["input"]
            groups.setdefault(uid, {}).setdefault(session, []).append((record["input"], record["output"]))
        read = dict(item for group in list(groups.values())[: args.groups] for item in group.items())
        sessions = {name: tokenize(texts, tokenizer) for name, texts in read.items()}
        order, prompts = _sorted([turn for turns in sessions.values() for turn in turns])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fix = "the folder that a run named as trainer.rollout_data_dir, after it has written a step"
        raise CommandError(f"--rollouts={file}: no lines with input and output ({error}). Fix: {fix}") from error
    sys.stdout.write(f"{len(prompts)} sequences of {file.name}, as text without special tokens\n")
    sys.stdout.write(report(sessions, tokenizer.decode, most=3))
    return order, prompts


def _sorted(turns: list[Turn]) -> tuple[PrefixOrder, IntArray]:
    """Return the prefix order of B tokenized sequences, and their prompt lengths (B,) in that order."""
    if not (turns and all(turn.prompt for turn in turns)):
        raise ValueError("prompts need at least one token")
    tokens = [np.append(ids, UNKNOWN + row) if len(ids) == n else ids for row, (ids, n) in enumerate(turns)]
    order = build_prefix_order(np.concatenate(tokens), np.cumsum([0, *map(len, tokens)]))
    return order, np.array([turns[row].prompt for row in order.sequences])


def _with_responses(prompts: IntArray, shared: IntArray, args: argparse.Namespace) -> tuple[PrefixOrder, IntArray]:
    """Return the order of ``--n`` responses to G prompts; each shares ``shared`` (G,) tokens with the previous one."""
    if (number := len(prompts) * args.n) > MAX_SEQUENCES:
        raise CommandError(f"--n={args.n}: {number:,} sequences are more than {MAX_SEQUENCES:,}. Fix: --n <fewer>")
    lengths = np.repeat(prompts, args.n)
    num_shared = lengths - 1
    num_shared[:: args.n] = shared
    return PrefixOrder(np.arange(number), lengths + args.response - 1, num_shared), lengths
