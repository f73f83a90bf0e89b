"""Remove the padding of a batch, run it as one packed row, pad the result back: the logits do not change.

    python examples/rmpad_forward.py                  # CPU, float32
    python examples/rmpad_forward.py --device cuda    # flash-attention 2 in bfloat16 where it is installed

The models are tiny and random, one like Qwen2.5 and one like Qwen3, so nothing is downloaded. This is what
``use_remove_padding=True`` does in verl; stock transformers needs only position ids that restart at 0. It prints with
``rich``, which ``scripts/install.sh`` brings.
"""

import argparse
import importlib.util
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from verl.utils.attention_utils import index_first_axis, pad_input, unpad_input

MODEL_TYPES = {"Qwen2.5": "qwen2", "Qwen3": "qwen3"}
VOCAB_SIZE = 512


@dataclass(frozen=True)
class RmpadResult:
    """Logits (B, S, V) of both ways, and the (B, S) mask of valid tokens."""

    padded: torch.Tensor
    repadded: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def error(self) -> torch.Tensor:
        """(B, S) largest difference over the vocabulary."""
        return (self.padded.float() - self.repadded.float()).abs().amax(dim=-1)


def build_model(model_type: str, device: str) -> PreTrainedModel:
    """A random model of two layers; attention is flash-attention 2 on a GPU that has it, SDPA elsewhere."""
    use_flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.1,
    )
    dtype = torch.bfloat16 if use_flash else torch.float32
    attn_implementation = "flash_attention_2" if use_flash else "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    return model.to(device).eval()


def build_batch(device: str, lengths: tuple[int, ...] = (23, 7, 64, 1)) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids and mask, (B, S) each."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(VOCAB_SIZE, (len(lengths), max(lengths)), generator=generator)
    attention_mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
    return input_ids.to(device), attention_mask.to(device)


@torch.no_grad()
def compare(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> RmpadResult:
    """The padded forward, and the same batch without padding."""
    batch_size, seqlen = input_ids.shape
    position_ids = (attention_mask.cumsum(dim=-1) - 1).masked_fill(attention_mask == 0, 1)
    padded = model(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False).logits

    # (B, S) -> (1, T): only valid tokens; each sequence is known by its position ids starting at 0 again
    input_ids_rmpad, indices, *_ = unpad_input(input_ids.unsqueeze(-1), attention_mask)
    position_ids_rmpad = index_first_axis(position_ids.reshape(-1, 1), indices)
    # use_cache=False: with a cache transformers would not look for sequences in the position ids
    logits_rmpad = model(input_ids_rmpad.T, position_ids=position_ids_rmpad.T, use_cache=False).logits
    repadded = pad_input(logits_rmpad.squeeze(0), indices, batch_size, seqlen)
    return RmpadResult(padded, repadded, attention_mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    table = Table(title=f"largest difference of logits, {device}")
    for column in ("model", "attention", "valid tokens", "padding", "largest logit", "rows run"):
        table.add_column(column)
    for name, model_type in MODEL_TYPES.items():
        model = build_model(model_type, device)
        result = compare(model, *build_batch(device))
        valid = result.attention_mask.bool()
        table.add_row(
            name,
            model.config._attn_implementation,
            f"{result.error[valid].max().item():.2e}",
            f"{result.error[~valid].max().item():.2e}",
            f"{result.padded.abs().max().item():.2f}",
            f"{int(valid.sum())} of {valid.numel()}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
