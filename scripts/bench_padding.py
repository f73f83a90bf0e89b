"""Time and memory of a padded forward and backward against the packed one, on a batch that is half padding.

    python scripts/bench_padding.py                                # CPU, small model
    python scripts/bench_padding.py --device cuda --size 4b        # one GPU, bfloat16, flash-attention 2

Both rows get ``input_ids`` and ``attention_mask``. *padded* is transformers' Qwen3, *packed* the plugin's, which drops
the padding inside ``forward``; same random weights, same loss over valid tokens. Each runs in a process of its own,
so that its peak memory is its own: allocated by torch on a GPU, resident on a CPU, above that of the model.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from benchmarks.shapes import SHAPES
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

from verl_pg_plugin.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

MODELS = {"padded": modeling_qwen3.Qwen3ForCausalLM, "packed": Qwen3ForCausalLM}
SIZES = {
    "small": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "4b": SHAPES["qwen3-4b"],
}


@dataclass(frozen=True)
class Measurement:
    """Seconds of each repeat, peak memory in MiB above the model's, and loss and gradient norm as a check."""

    seconds: list[float]
    peak_mib: float
    loss: float
    grad_norm: float


def half_padded_batch(batch_size: int, seqlen: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, S) token ids and mask; lengths run evenly from 0 to S, so half of the positions are padding."""
    lengths = ((torch.arange(batch_size) + 0.5) * seqlen / batch_size).long()
    input_ids = torch.randint(4096, (batch_size, seqlen), generator=torch.Generator().manual_seed(0))
    attention_mask = (torch.arange(seqlen) < lengths.unsqueeze(1)).long()
    return input_ids.to(device), attention_mask.to(device)


def measure(mode: str, args: argparse.Namespace) -> Measurement:
    """Run one mode in this process."""
    on_gpu = args.device == "cuda"
    config = Qwen3Config(**SIZES[args.size], attn_implementation="flash_attention_2" if on_gpu else "sdpa")
    with torch.device(args.device):
        model = MODELS[mode](config).to(torch.bfloat16 if on_gpu else torch.float32).train()
    torch.manual_seed(0)  # again: the two classes draw their initial weights in different order
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    input_ids, attention_mask = half_padded_batch(args.batch_size, args.seqlen, args.device)
    predicts = (attention_mask[:, 1:] == 1).flatten()

    def step() -> torch.Tensor:
        model.zero_grad()
        logits = model(input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits[predicts].float(), input_ids[:, 1:].flatten()[predicts])
        loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        return loss.detach()

    before = _peak_mib(on_gpu)
    loss = step()
    peak_mib = _peak_mib(on_gpu) - before
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    norms = [parameter.grad.float().norm() for parameter in model.parameters() if parameter.grad is not None]
    return Measurement(seconds, peak_mib, loss.item(), torch.stack(norms).norm().item())


def _peak_mib(on_gpu: bool) -> float:
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=MODELS, help="measure one mode in this process and write JSON")
    args = parser.parse_args()
    if args.only:
        sys.stdout.write("\n" + json.dumps(asdict(measure(args.only, args))) + "\n")
        return
    table = Table(title=f"{args.batch_size} x {args.seqlen}, half padding, {args.size} on {args.device}")
    for column in ("mode", "median s", "min .. max", "peak MiB above the model", "loss", "gradient norm"):
        table.add_column(column)
    for mode in MODELS:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--only", mode], check=True, stdout=subprocess.PIPE, text=True
        )
        run = Measurement(**json.loads(done.stdout.splitlines()[-1]))
        spread = f"{min(run.seconds):.3f} .. {max(run.seconds):.3f}"
        numbers = (f"{run.peak_mib:.0f}", f"{run.loss:.5f}", f"{run.grad_norm:.5f}")
        table.add_row(mode, f"{statistics.median(run.seconds):.3f}", spread, *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
