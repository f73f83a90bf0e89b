"""``estimate``: what sharing prompts would gain on given data, by token budget, before anything is run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from verl_pg_plugin.cli.command import CommandError

__all__ = ["add_parser", "run"]

DESCRIPTION = """\
What packed mode would gain over stock verl (rmpad) on one rank's mini-batch, by token budget. The mini-batch is cut and
laid out as in a training and priced in FLOPs, with a fixed price for each micro-batch; nothing is run on a model.

Lengths come from one of:
  --prompt P --response R --n N     every group alike
  --data FILE.parquet --response R --n N
                                    prompts of a data set, through the model's tokenizer and chat template: what prompts
                                    share with each other (a system prompt) counts, as in a training
  --rollouts DIR                    what a run wrote under trainer.rollout_data_dir. A run of packed mode leaves exact
                                    lengths there (DIR/lengths/STEP.jsonl), which are taken first; else it is verl's
                                    text without special tokens, so lengths are some tokens short and turns of a chat
                                    run together. The last step is read
"""


def add_parser(subparsers: Any) -> None:
    """Add ``estimate`` to the command line."""
    parser = subparsers.add_parser(
        "estimate",
        help="what sharing would gain on your data: dedup ratio, FLOPs, predicted speed-up by token budget",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or a hub id that is in the cache")
    parser.add_argument("--prompt", type=_positive, help="tokens of each prompt")
    parser.add_argument("--response", type=_positive, help="tokens of each response (their mean)")
    parser.add_argument("--n", type=_positive, default=8, help="responses to a prompt (8)")
    parser.add_argument(
        "--groups",
        type=_positive,
        default=8,
        help="prompts of a mini-batch on one rank; of rollouts the first ones (8)",
    )
    parser.add_argument("--data", type=Path, help="parquet file of prompts as verl reads it")
    parser.add_argument("--prompt-key", default="prompt", help="column of the messages (prompt)")
    parser.add_argument("--rollouts", type=Path, help="folder that trainer.rollout_data_dir named")
    parser.add_argument("--budget", type=_positive, nargs="+", help="tokens of a micro-batch; several by default")
    parser.add_argument("--memory-gib", type=float, help="free for activations: picks the best budget within it")
    parser.add_argument(
        "--compile-layers",
        choices=("auto", "True", "False"),
        default="auto",
        help="prefix_grouper.compile_layers (auto: what it comes to for such a model under FSDP2 on a GPU)",
    )
    parser.add_argument(
        "--keep-activations",
        type=_kept,
        default="attention",
        metavar="{attention,all,GIB}",
        help="prefix_grouper.keep_activations (attention); for auto name the GiB that the device will have left",
    )
    parser.add_argument("--kernel", choices=("flash_attn_2", "flash_attn_3", "flash_attn_4"), default="flash_attn_2")
    parser.add_argument("--no-carry", action="store_true", help="prefix_grouper.carry=never")
    parser.add_argument("--no-ref", action="store_true", help="the step has no reference policy")
    parser.add_argument("--gen-seconds", type=float, help="of a step's rollout: also predicts the step")
    parser.add_argument("--tflops", type=float, default=380.0, help="that a GPU reaches, for the step (380: an H200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw speed-ups by budget")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the table, and write what was asked for.

    Returns:
        0.

    Raises:
        CommandError: no lengths or two sources of them, a file or model that cannot be read, or a budget that no
            sequence fits.
    """
    from verl_pg_plugin.cli.estimate import report, sources

    for option, file in (("--json", args.json), ("--plot", args.plot)):
        if file is not None and not file.absolute().parent.is_dir():
            raise CommandError(f"{option} {file}: there is no folder {file.parent}")
    if sum(source is not None for source in (args.prompt, args.data, args.rollouts)) != 1:
        raise CommandError("give lengths by one of --prompt, --data and --rollouts; --help says more")
    model = sources.load_model(args.model)
    batch, remark = sources.read_batch(args)
    forecasts = report.by_budget(batch, model, args)
    report.show(forecasts, args, remark)
    if args.json:
        args.json.write_text(report.to_json(forecasts, args))
    if args.plot:
        report.plot(forecasts, args.plot)
    return 0


def _kept(text: str) -> str | float:
    if text in ("attention", "all"):
        return text
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        known = {
            "auto": "; for auto name the GiB that the device will have left",
            "mlp": "; of MLPs that are kept alone there is no forecast",
        }.get(text, "")
        raise argparse.ArgumentTypeError(f"{text} is neither attention nor all nor GiB above 0{known}")
    return gib


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)
