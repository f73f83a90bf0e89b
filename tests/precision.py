"""The rule for low precision: an error against float32 at most 1.1 times that of stock rmpad."""

import torch

from tests.support import Result

PRECISIONS = {
    name: {"mixed_precision": {"param_dtype": name, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    for name in ("fp32", "bf16", "fp16")
}
"""Fields of an engine config."""
BF16 = PRECISIONS["bf16"]
POOLED = 4096
"""Parameters with fewer elements are compared together: the error of a few numbers is a matter of luck."""
FACTOR = 1.1
UNCLIPPED = 1e4
SMOOTH_LOSS = {
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), UNCLIPPED),
    "kl_loss_type": "mse",
}
"""Settings for ``actor_loss`` without thresholds: else one token that rounding moves across one decides the error of
a whole gradient, on either side."""
PLAUSIBLE = 0.1
"""A relative error of stock rmpad beyond this is a fault and not rounding: nothing can be held against it."""


def errors(result: Result, reference: Result) -> dict[str, float]:
    """Norm of the difference from float32 relative to float32, of each output and each parameter's gradient."""
    pairs = {name: (torch.cat(rows), torch.cat(reference.outputs[name])) for name, rows in result.outputs.items()}
    small = []
    for name, want in reference.gradients.items():
        pair = (result.gradients[name].flatten(), want.flatten())
        if want.numel() < POOLED:
            small.append(pair)
        else:
            pairs[name] = pair
    if small:
        pairs["small parameters"] = tuple(map(torch.cat, zip(*small, strict=True)))
    return {name: ((got.cpu().float() - want).norm() / want.norm()).item() for name, (got, want) in pairs.items()}


def pooled(batches: list[dict[str, float]]) -> dict[str, float]:
    """Errors of several batches as one, which are less a matter of luck."""
    return {name: (sum(errors[name] ** 2 for errors in batches) / len(batches)) ** 0.5 for name in batches[0]}


def assert_no_worse(actual: dict[str, float], stock: dict[str, float]) -> None:
    """Every error of ``actual`` within the rule."""
    faults = {name: error for name, error in stock.items() if not error < PLAUSIBLE}
    assert not faults, f"stock rmpad itself is wrong: {faults}"
    worse = [
        f"{name}: {error / stock[name]:.3f} times the error of stock rmpad"
        for name, error in actual.items()
        if error > FACTOR * stock[name]
    ]
    assert not worse, "; ".join(worse)
