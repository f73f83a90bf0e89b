"""The rule for low precision: an error against float32 at most 1.1 times that of stock rmpad."""

import torch

from tests.support import Result

POOLED = 4096
"""Parameters with fewer elements are compared together: the error of a few numbers is a matter of luck."""
FACTOR = 1.1
PLAUSIBLE = 0.3
"""A relative error of stock rmpad beyond this is a fault and not rounding: nothing can be held against it."""


def errors(result: Result, reference: Result) -> dict[str, float]:
    """Norm of the difference from float32 relative to float32, of each output and each parameter's gradient."""
    found, small = {}, []
    for name, rows in result.outputs.items():
        whole, want = torch.cat(rows).cpu().float(), torch.cat(reference.outputs[name])
        found[name] = ((whole - want).norm() / want.norm()).item()
    for name, want in reference.gradients.items():
        difference = (result.gradients[name].cpu().float() - want).flatten()
        if len(difference) < POOLED:
            small.append(difference / want.norm())
        else:
            found[name] = (difference.norm() / want.norm()).item()
    return {**found, "small parameters": torch.cat(small).norm().item() / len(small) ** 0.5} if small else found


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
